"""Flags in one bit each: exact, on every device, in an eighth of the bytes."""

import pytest
import torch

from backsketch.cpu_library import library
from backsketch.storage import cpu_flags
from backsketch.storage import flags as storage_flags
from backsketch.storage.flags import flag_bytes, read_flags, write_flags
from backsketch.storage.packing import without_fused_kernels
from backsketch.storage.two_numbers import read_two_numbers, write_two_numbers


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


LARGE = (32_768, 32_769, 40_000, 8 * 4096 + 8 * 15 + 3, 100_001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 43, *LARGE])
def test_two_numbers_come_back_exact_and_the_kernel_writes_the_same_flags(count, dtype):
    other = torch.ones((), dtype=dtype).div_(1 - 0.1).item()
    numbers = (torch.rand(count) < 0.9).to(dtype) * other
    numbers[: count // 3] *= -0.0 + (numbers[: count // 3] != 0)  # a zero with a sign is a zero
    for tensor in (numbers, numbers.repeat(2).view(2, count).t()[:, 0]):
        flags = write_two_numbers(tensor, other)
        with without_fused_kernels():
            plain = write_two_numbers(tensor, other)
        assert flags is not None
        assert plain is not None
        assert torch.equal(flags, plain)
        back = read_two_numbers(flags, tensor.shape, dtype, other)
        with without_fused_kernels():
            assert torch.equal(back, read_two_numbers(flags, tensor.shape, dtype, other))
        assert back.dtype == dtype
        assert torch.equal(back, tensor)


@pytest.mark.parametrize("strange", [0.5, -1.25, float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 20_000, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_third_number_is_seen(dtype, place, strange):
    numbers = (torch.rand(50_003) < 0.5).to(dtype) * 1.25
    numbers[place] = strange
    assert write_two_numbers(numbers, 1.25) is None


def test_zeros_beside_a_number_that_overflows_stay_zero():
    """In fp16, dropout with p = 1 − 1e-5 multiplies by infinity."""
    other = torch.ones((), dtype=torch.float16).div_(1e-5).item()
    numbers = torch.zeros(100, dtype=torch.float16)
    numbers[3] = other
    flags = write_two_numbers(numbers, other)
    assert flags is not None
    assert torch.equal(read_two_numbers(flags, numbers.shape, torch.float16, other), numbers)


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
def test_the_kernel_reads_with_several_threads(monkeypatch):
    monkeypatch.setattr(cpu_flags, "threads_for", lambda values: 3)
    test_two_numbers_come_back_exact_and_the_kernel_writes_the_same_flags(100_001, torch.float32)
