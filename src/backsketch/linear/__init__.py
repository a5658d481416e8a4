"""The paper's method: a linear layer that trains from a sketch of its input."""
