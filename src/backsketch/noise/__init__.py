"""The noise of a weight gradient in closed form: what the batch brings, and what a sketch adds."""

from .closed_forms import alignment, paper_bound, paper_ratio, paper_variance, sgd_variance, sketch_variance

__all__ = ["alignment", "paper_bound", "paper_ratio", "paper_variance", "sgd_variance", "sketch_variance"]
