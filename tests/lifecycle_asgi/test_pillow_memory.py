"""What a picture is charged, beside what Pillow really takes for it."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from pathlib import Path

import pytest

from lifecycle_asgi import estimate, media_profile

Image = pytest.importorskip("PIL.Image")
# In a process of its own, whose peak can be reset, after its decoder has been loaded.
DECODE = """
import io
import re
import sys
from pathlib import Path

from PIL import Image

def nbytes(field):
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{field}:\\s+(\\d+) kB", status, re.MULTILINE)[1]) * 1024

small, photo = (Path(name).read_bytes() for name in sys.argv[1:])
Image.open(io.BytesIO(small)).convert("RGB").tobytes()
Path("/proc/self/clear_refs").write_text("5")
before = nbytes("VmRSS")
image = Image.open(io.BytesIO(photo))
pixels = image.convert("RGB").tobytes()
print(nbytes("VmHWM") - before)
"""


def encode(width: int, height: int, kind: str, mode: str) -> bytes:
    """A file that compresses as badly as a photo."""
    file = io.BytesIO()
    Image.effect_noise((width, height), 50).convert(mode).save(file, kind)
    return file.getvalue()


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells")
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_takes_no_more_than_it_is_charged(kind: str, mode: str, tmp_path: Path) -> None:
    """Decoded, converted and copied, as the profile ``pillow`` counts it."""
    files = {"small": encode(8, 8, kind, mode), "photo": encode(2000, 1500, kind, mode)}
    for name, file in files.items():
        (tmp_path / name).write_bytes(file)
    done = subprocess.run(
        [sys.executable, "-c", DECODE, *(str(tmp_path / name) for name in files)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    url = (
        f"data:image/{kind.lower()};base64,{base64.b64encode(files['photo']).decode()}"
    )
    request = {"messages": [{"content": [{"image_url": {"url": url}}]}]}
    found = estimate(request, media_profile("pillow"))
    # The estimate has the file as text of the request.
    charged = found.total - len(url) + len(files["photo"])
    assert found.assumed == 0
    assert 0.6 * charged < int(done.stdout) <= charged
