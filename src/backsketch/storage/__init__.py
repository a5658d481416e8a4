"""How a kept tensor is stored: as it is, or as codes of a few bits between the ends of a range."""
