"""What is kept for backward, stored in few bits: rows and slopes as codes between the ends of a range, and flags."""
