"""Build the wheel and the sdist into dist/, twice, and check them: `make dist`.

Both builds are of copies of the tracked files, in two folders and with two umasks: their bytes must
be equal. A wheel that is built from the sdist must be equal, too. `--publish` also refuses while
`pyproject.toml` has the address of a placeholder, or the changelog says that the version is not
released.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
# A project's own clock, so that a build in a later year has the same bytes.
EPOCH = "1580601600"
UMASKS = (0o022, 0o077)


class DistError(Exception):
    """What was built, or is to be published, is not as it must be."""


def copy_tracked(to: Path) -> None:
    """Copy the files that git tracks, and those that it would."""
    listed = _run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            target = to / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)


def build(source: Path, to: Path, *options: str) -> list[Path]:
    """Build the wheel and the sdist of a folder with the backend that is installed here."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(to), *options]
    _run(*command, str(source), cwd=source)
    return sorted(to.iterdir())


def build_twice(work: Path) -> list[Path]:
    """Build two copies of the project, and the wheel of the sdist; return the first files.

    Raises:
        DistError: their bytes differ.
    """
    builds = []
    for number, umask in enumerate(UMASKS):
        before = os.umask(umask)
        try:
            copy_tracked(work / f"source{number}")
            builds.append(build(work / f"source{number}", work / f"dist{number}"))
        finally:
            os.umask(before)
    sdist = next(path for path in builds[0] if path.name.endswith(".tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (folder,) = (work / "unpacked").iterdir()
    builds.append(build(folder, work / "dist-of-sdist", "--wheel"))
    sums = [{path.name: checksum(path) for path in paths} for paths in builds]
    for others in sums[1:]:
        for name, digest in others.items():
            if sums[0][name] != digest:
                raise DistError(f"{name} must have the same bytes in each build, got others.")
    return builds[0]


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check(paths: list[Path]) -> None:
    """Have twine and check-wheel-contents look at what was built."""
    _run(sys.executable, "-m", "twine", "check", "--strict", *map(str, paths), cwd=ROOT)
    wheels = [path for path in paths if path.suffix == ".whl"]
    _run(sys.executable, "-m", "check_wheel_contents", *map(str, wheels), cwd=ROOT)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            refuse_relative_links(archive.read(name).decode())


def refuse_relative_links(text: str) -> None:
    """Refuse a description whose links need files beside it.

    Raises:
        DistError: a link is relative.
    """
    links = re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.DOTALL)
    )
    relative = [link for link in links if not re.match(r"[a-z]+:|#", link)]
    if not links or relative:
        raise DistError(
            f"the description must have absolute links, got {relative[:3] or 'none'}."
            "\nrelease/long_description.py makes them."
        )


def refuse_unready(pyproject: str, changelog: str, version: str) -> None:
    """Refuse to publish what a maintainer has not finished.

    Raises:
        DistError: an address is a placeholder, or the version is not released.
    """
    if ".example/" in pyproject:
        raise DistError(
            "[project.urls] in pyproject.toml must have the project's addresses, got .example."
            "\nWrite them there before you publish."
        )
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        raise DistError(
            f"CHANGELOG.md must have the day of {version}, got none.\nWrite the heading as"
            f" '## {version} (YYYY-MM-DD)'."
        )


def _run(*command: str, cwd: Path) -> str:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise DistError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    """Build, check, and write dist/ with the checksums."""
    parser = argparse.ArgumentParser(description="Build and check the wheel and the sdist.")
    parser.add_argument("--publish", action="store_true", help="refuse what is not ready")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        paths = build_twice(Path(work))
        check(paths)
        shutil.rmtree(DIST, ignore_errors=True)
        DIST.mkdir()
        for path in paths:
            shutil.copyfile(path, DIST / path.name)
            print(f"{checksum(path)}  dist/{path.name}  {path.stat().st_size / 1e6:.2f} MB")
    if options.publish:
        version = paths[0].name.split("-")[1]
        texts = [(ROOT / name).read_text("utf-8") for name in ("pyproject.toml", "CHANGELOG.md")]
        refuse_unready(*texts, version)


if __name__ == "__main__":
    try:
        main()
    except DistError as error:
        sys.exit(str(error))
