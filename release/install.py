"""Install the wheel of dist/ in bare environments, and use it there.

    python release/install.py            the wheel without extras: `make dist` does so
    python release/install.py --extras   also each extra, alone: `make extras`

The environments are temporary. torch goes in first, by its pin in constraints.txt. An environment
with an extra sees the packages of the one without; so torch is installed once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What users install; the others are for those who change hookline.
EXTRAS = ("cli", "page", "plots", "vision", "text", "store", "ray", "loggers", "lightning")


class Bare:
    """A new environment without packages but pip.

    Args:
        folder: where to make it.
        base: an environment whose packages it sees; None for none.
    """

    def __init__(self, folder: Path, base: Bare | None = None) -> None:
        venv.create(folder, with_pip=True)
        self.python = folder / "bin" / "python"
        self.packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        if base is not None:
            (self.packages / "base.pth").write_text(f"{base.packages}\n", "utf-8")

    def install(self, *names: str) -> None:
        """Install packages by the pins of the project."""
        constraints = str(ROOT / "constraints.txt")
        pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        self.run(*pip, "--constraint", constraints, *names)

    def run(self, *arguments: str) -> None:
        """Run Python, outside the checkout."""
        environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([self.python, *arguments], cwd="/", env=environment, check=True)


def main() -> None:
    """Install and use the wheel, then each extra."""
    parser = argparse.ArgumentParser(description="Install the wheel in bare environments.")
    parser.add_argument("--extras", action="store_true", help="also each extra, alone")
    parser.add_argument("--only", action="append", choices=EXTRAS, help="this extra alone")
    options = parser.parse_args()
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"dist/ must hold one wheel, got {len(wheels)}.\nRun python release/dist.py.")
    smoke = str(ROOT / "release" / "smoke.py")
    with tempfile.TemporaryDirectory() as place:
        base = Bare(Path(place, "bare"))
        base.install("torch")
        base.install(str(wheels[0]))
        base.run("-P", smoke)
        for extra in options.only or (EXTRAS if options.extras else ()):
            layer = Bare(Path(place, extra), base)
            layer.install(f"{wheels[0]}[{extra}]")
            layer.run("-P", smoke, extra)


if __name__ == "__main__":
    main()
