"""Flags in one bit each: exact, on every device, in an eighth of the bytes."""

import pytest
import torch

from backsketch.storage import flags as storage_flags
from backsketch.storage.flags import flag_bytes, read_flags, write_flags


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), *((count,) for count in range(1, 26)), (7, 9, 11), (64, 1000)])
def test_flags_come_back_exact(shape):
    flags = torch.rand(shape) < 0.5
    bits = write_flags(flags)
    assert bits.dtype == torch.uint8
    assert bits.shape == (flag_bytes(flags.numel()),) == (-(-flags.numel() // 8),)
    back = read_flags(bits, flags.shape)
    assert back.dtype == torch.bool
    assert back.is_contiguous()
    assert torch.equal(back, flags)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 43, 64, 1000])
def test_bits_are_the_same_all_at_once(count):
    """As an accelerator writes and reads them."""
    flags = torch.rand(count) < 0.5
    bits = storage_flags._write_at_once(flags.view(torch.uint8))
    assert torch.equal(bits, write_flags(flags))
    assert torch.equal(storage_flags._read_at_once(bits, count), flags)


def test_layouts():
    flags = torch.rand(12, 30, 5) < 0.3
    for one in (flags.transpose(0, 2), flags[::2, 3:], flags[:1].expand(4, 30, 5), flags.transpose(0, 1)[::3]):
        assert torch.equal(read_flags(write_flags(one), list(one.shape)), one)


def test_bits_are_where_the_docs_say():
    flags = torch.rand(43) < 0.5
    bits = write_flags(flags)
    for number in range(48):
        expected = bool(flags[number]) if number < 43 else False
        assert bool(bits[number % 6] >> (number // 6) & 1) == expected


def test_what_is_read_owns_its_memory_and_what_is_written_keeps_none_of_the_input():
    flags = torch.ones(5, dtype=torch.bool)
    bits = write_flags(flags)
    flags.zero_()
    assert read_flags(bits, (5,)).all()


def test_meta():
    bits = write_flags(torch.empty(3, 5, 7, dtype=torch.bool, device="meta"))
    assert bits.shape == (14,)
    assert read_flags(bits, (3, 5, 7)).shape == (3, 5, 7)
    assert read_flags(bits, (3, 5, 7)).is_meta
