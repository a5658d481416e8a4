"""Fitting: whether a training step fits into a card, which batch and length do, and what each way to train costs."""
