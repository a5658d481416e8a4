"""The paper: a linear layer that trains from a sketch of its input, and what one call of it keeps."""
