from __future__ import annotations

import pytest

from warm import DYNAMO, run_python


@pytest.mark.processes
def test_torchvision_is_imported_whole_after_a_failed_import():
    # Where torchvision's operators fit the installed torch, this is the ordinary import.
    code = (
        "import sys\n"
        "try:\n    import torchvision\n"
        "except RuntimeError:\n    pass\n"
        "from hookline.models.torchvision_import import import_torchvision\n"
        "vision = import_torchvision()\n"
        "assert vision is import_torchvision() is sys.modules['torchvision']\n"
        "import torchvision.transforms.v2\n"
        "print(vision.models.resnet18().fc.out_features)"
    )
    result = run_python("-W", "error", "-c", code, of=DYNAMO)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "1000"
