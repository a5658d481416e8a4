"""Noise as a control: hold it by the learning rate, or by what layers keep."""
