"""`jaxserve doctor`: check this machine for a server, with a verdict and a fix for each part."""

from __future__ import annotations

import argparse

from jaxserve.cli.flags import add_flags, add_model_flag, configs_from_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `jaxserve serve`: the checks are for a server with these settings."""
    add_model_flag(parser)
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print one line per check, and its fix; returns 1 if anything is wrong, else 0."""
    configs = configs_from_flags(arguments)
    from jaxserve.tools.doctor import examine  # after the flags are checked, which is quick

    findings = examine(configs)
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{finding.verdict:<5}  {finding.subject:<{width}}  {finding.text}")
        if finding.fix:
            print(f"{'':<5}  {'':<{width}}  fix: {finding.fix}")
    return 1 if any(finding.verdict == "wrong" for finding in findings) else 0
