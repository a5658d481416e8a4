"""Keep in few bits what every operation but a sketched layer keeps for backward."""
