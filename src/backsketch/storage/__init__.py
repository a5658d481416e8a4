"""How kept rows are stored in few bits: codes between the ends of a range."""
