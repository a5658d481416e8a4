"""Ways into the trainers people use; each module is imported only by whoever asks for it."""
