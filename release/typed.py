"""Measure how much of the public interface has known types, by pyright: `make types`."""

from __future__ import annotations

import json
import subprocess
import sys

LEAST = 0.99


def main() -> None:
    """Print the share, and what lacks a type; fail below the least."""
    command = [sys.executable, "-m", "pyright", "--verifytypes", "hookline", "--ignoreexternal"]
    done = subprocess.run([*command, "--outputjson"], capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)["typeCompleteness"]
    for symbol in report["symbols"]:
        if symbol["isExported"] and not (symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"]):
            print(symbol["name"])
    counts = report["exportedSymbolCounts"]
    print(f"known types: {report['completenessScore']:.2%} of {sum(counts.values())} names")
    if report["completenessScore"] < LEAST:
        sys.exit(f"at least {LEAST:.0%} of the names must have known types.")


if __name__ == "__main__":
    main()
