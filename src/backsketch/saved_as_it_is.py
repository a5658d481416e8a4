"""SavedAsItIs: what hooks on saved tensors return for a tensor that they leave as it is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .torch_private import version_of


@dataclass(frozen=True, slots=True, eq=False)
class SavedAsItIs:
    """A saved tensor, and its version when it was saved: autograd itself checks no version where hooks are."""

    kept: Tensor
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> SavedAsItIs:
        """Return what to keep of a tensor that an operation saves."""
        # An output still has its grad_fn, which owns what is kept: undetached, neither would ever be freed. What has
        # none stays the very object that was saved, since others may hold weak references to it.
        kept = tensor if tensor.grad_fn is None else tensor.detach()
        return cls(kept, None if tensor.is_inference() else version_of(tensor))

    def unpack(self) -> Tensor:
        """Return the tensor as autograd does: not if it was changed since."""
        tensor = self.kept
        if self.version is not None and version_of(tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"{tensor.type()} of shape {tuple(tensor.shape)} is at version {version_of(tensor)}, "
                f"expected version {self.version}"
            )
        return tensor
