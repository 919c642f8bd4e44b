"""`python -m tests.quire_tools.top`: takes docs/pictures/top.png, `quire top` in a terminal of 120 x 36.

The stack has the built-in model and is under load.
"""

import io
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image, ImageChops
from rich.console import Console

from quire.local_stack.stack import LocalStack
from quire.operators.admin import AdminClient
from quire_tools.top.drawing import Surroundings, frame
from quire_tools.top.live import LiveTopSource
from quire_tools.top.states import TopState
from quire_tools.top.view import TopView
from tests.support.tree import ROOT

PICTURE = ROOT / "docs" / "pictures" / "top.png"
WIDTH, HEIGHT = 120, 36
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_WINDOW = "1500,1000"
_NUM_COLOURS = 200
_NUM_LOOKS = 120


def main() -> int:
    """Status 1 where there is no browser."""
    browser = next((path for path in map(shutil.which, _BROWSERS) if path), None)
    if browser is None:
        sys.stderr.write("a Chromium is needed; on Debian: apt install chromium\n")
        return 1
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        drawn, shot = Path(folder) / "top.svg", Path(folder) / "top.png"
        _save_busy(drawn)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={_WINDOW}"]
        command = [browser, *flags, f"--user-data-dir={folder}/profile", f"--screenshot={shot}", drawn.as_uri()]
        subprocess.run(command, check=True, timeout=240, capture_output=True)
        _pack(shot)
    sys.stdout.write(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size // 1024} KiB\n")
    return 0


def _save_busy(path: Path) -> None:
    """A moment with requests that wait, for more than one reason, and one that is swapped out."""
    stack = LocalStack(
        policy="vllm-v0",
        policy_set=("preemption_mode=swap",),
        worker_args=("--num-gpu-blocks-override", "300"),
        start_timeout_s=300.0,
    )
    with stack:
        command = [
            *(sys.executable, "-m", "quire", "bench", "--target", stack.grpc_address, "-n", "900", "--rate", "25"),
            *("--prompt-len", "lognormal:128:0.7", "--output-len", "lognormal:96:0.6"),
        ]
        load = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with AdminClient(stack.admin_address) as client:
                _save(_moment(LiveTopSource(client)), stack.admin_address, path)
        finally:
            load.kill()
            load.wait()


def _moment(source: LiveTopSource) -> TopState:
    for _ in range(_NUM_LOOKS):
        state = source.read()
        numbers = state.numbers
        if numbers and numbers.swapped and numbers.waiting > 30 and len(numbers.waits) > 2 and numbers.step > 600:
            break
        time.sleep(0.5)
    return state


def _save(state: TopState, title: str, path: Path) -> None:
    console = Console(
        record=True, width=WIDTH, height=HEIGHT, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(frame(state, TopView(), Surroundings(title), WIDTH, HEIGHT))
    console.save_svg(str(path), title="quire top")


def _pack(shot: Path) -> None:
    """Without the empty margin, in few colours."""
    image = Image.open(shot).convert("RGB")
    box = ImageChops.difference(image, Image.new("RGB", image.size, "white")).getbbox()
    image.crop(box).quantize(_NUM_COLOURS).save(PICTURE, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
