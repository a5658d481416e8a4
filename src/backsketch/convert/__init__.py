"""Turn linear layers into sketched ones in place, and back; and how much of a model that reaches."""
