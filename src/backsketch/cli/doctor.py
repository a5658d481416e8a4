"""``backsketch doctor``: what is installed here, and whether sketched gradients are right on this machine."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from typer import Option

from .environment import Bf16Probe, Extra, devices, extras, kernels, versions
from .selftest import ALLOWED, Finding, self_test


def doctor(
    as_json: Annotated[bool, Option("--json", help="Print the findings as JSON, and nothing else.")] = False,
) -> int:
    """Show what is installed, and test that sketched gradients are unbiased on this machine.

    Example: backsketch doctor

    It takes about five seconds, most of them to load torch. The exit code is 0
    if the self-test passes on every device, and 1 if it does not.
    """
    probe = Bf16Probe()  # runs while the self-test does
    found_devices, found_extras = devices(), extras()
    tests = self_test(list(found_devices))
    if as_json:
        findings = list(tests)
    else:
        _show_environment(found_devices, found_extras)
        findings = list(_shown(tests))
    healthy, bf16 = all(finding.ok for finding in findings), probe.result()
    if as_json:
        print(json.dumps(_record(healthy, found_devices, found_extras, bf16, findings), indent=1))
    else:
        print()
        _line("bf16 on CPU", _bf16_text(bf16))
        for place, text in kernels().items():
            _line(f"packing on {place}", text)
        print("\nhealthy" if healthy else "\nnot healthy: sketched layers do not train correctly here")
    return 0 if healthy else 1


def _record(
    healthy: bool,
    found_devices: Mapping[str, str],
    found_extras: Sequence[Extra],
    bf16: Mapping[str, Any],
    findings: Sequence[Finding],
) -> dict[str, Any]:
    return {
        "healthy": healthy,
        "versions": versions(),
        "devices": found_devices,
        "extras": {extra.name: {"packages": extra.packages, "install": extra.install} for extra in found_extras},
        "bf16_on_cpu": bf16,
        "kernels": kernels(),
        "self_test": [{**asdict(finding), "ok": finding.ok} for finding in findings],
    }


def _show_environment(found_devices: Mapping[str, str], found_extras: Sequence[Extra]) -> None:
    for name, version in versions().items():
        _line(name, version)
    for device, text in found_devices.items():
        _line(device, text)
    for extra in found_extras:
        present = ", ".join(f"{name} {version}" for name, version in extra.packages.items() if version is not None)
        _line(f"[{extra.name}]", present or "not installed")
        if extra.missing:
            _line("", f"missing {', '.join(extra.missing)}:")
            _line("", f"{extra.install}")


def _shown(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Print each finding as soon as it is known, and yield it."""
    print("\nself-test: output, ∂X and ∂b are those of nn.Linear; the mean of many ∂W,")
    print(f"projected onto the true one, is 1 to within {ALLOWED:g} standard errors", flush=True)
    for finding in findings:
        wrong = f", wrong: {', '.join(finding.wrong)}" if finding.wrong else ""
        text = f"{finding.mean:.3f} ± {finding.standard_error:.3f}{wrong}"
        print(f"  {'ok  ' if finding.ok else 'FAIL'}  {finding.device:7} {finding.config:27} {text}", flush=True)
        yield finding


def _bf16_text(bf16: Mapping[str, Any]) -> str:
    if bf16["works"]:
        return "works"
    if bf16["fix"] is None:
        return f"a matmul ends with {bf16['ends_with']}: do not train in bf16 on this CPU"
    ((name, value),) = bf16["fix"].items()
    return f"a matmul ends with {bf16['ends_with']}. Set {name}={value} before torch is imported, and it works"


def _line(name: str, text: str) -> None:
    width = min(shutil.get_terminal_size().columns, 100)
    print(textwrap.fill(text, width, initial_indent=f"{name:16}", subsequent_indent=" " * 16, break_on_hyphens=False))
