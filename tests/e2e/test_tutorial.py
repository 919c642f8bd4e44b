"""The tutorial works as written: its commands and programs are run in order, and show what the lessons promise.

The first lesson here, on the stack that other tests use; all of them, each with `quire up` as its page starts it, in
`make test-long`.
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import jsonschema
import pytest

from quire.local_stack.stack import LocalStack
from tests.support.stack.up_process import UpProcess
from tests.support.tutorial import LESSONS, Lesson

_LIMIT_S = 2_400.0


def addresses_of(grpc: str, http: str, lab: str) -> dict[str, str]:
    """The addresses that lessons name, here."""
    return {"http://127.0.0.1:8000": http, "127.0.0.1:50051": grpc, "http://127.0.0.1:8001": lab}


@contextmanager
def started(number: int, folder: Path, *options: str) -> Iterator[tuple[Lesson, UpProcess]]:
    """The lesson with its own `quire up`."""
    with UpProcess(*options, limit_s=_LIMIT_S) as up:
        grpc, http, admin = up.wait_ready()
        lab = up.lines[-1].rpartition("lab=")[2]
        here = addresses_of(grpc, http, lab)
        here |= {"4711": str(up.pids["worker"]), "127.0.0.1:40001": up.addresses["worker"]}
        yield Lesson(number, folder, here, {"QUIRE_TARGET": grpc, "QUIRE_ADMIN": admin, "QUIRE_LAB": lab}), up
        assert up.stop(signal.SIGINT) == 0


def test_lessons_end_with_something_seen() -> None:
    """Eight pages; each says what was seen and leads to the next one."""
    assert len(LESSONS) == 8
    for path, following in zip(LESSONS, [*LESSONS[1:], None], strict=True):
        end = path.read_text(encoding="utf-8").partition("\n**What you saw.**")[2]
        assert end and "```" not in end, path.name
        assert following is None or f"({following.name})" in end


def test_the_first_lesson(stack: LocalStack, tmp_path: Path) -> None:
    """Text by the command, over HTTP and from Python."""
    here = addresses_of(stack.grpc_address, stack.http_url, stack.admin_url)
    lesson = Lesson(1, tmp_path, here, {"QUIRE_TARGET": stack.grpc_address})
    first_lesson(lesson)


def first_lesson(lesson: Lesson) -> None:
    """Everything but the installation and `quire up`."""
    lesson.take("sh", "make setup")
    lesson.take("sh", "quire up")
    assert lesson.run("quire generate").strip()
    assert [line for line in lesson.run("curl").splitlines() if line][-1] == "data: [DONE]"
    assert lesson.run("from quire", "python").strip()
    assert lesson.left == []


@pytest.mark.long
def test_a_killed_worker(tmp_path: Path) -> None:
    """Lesson 2: the stream that lost its worker equals the one that did not."""
    with started(2, tmp_path) as (lesson, up):
        lesson.take("sh", "quire up")
        lesson.run("quire generate")
        stream = lesson.begin("quire generate")
        while (size := _size(tmp_path / "killed.txt")) < 200:
            assert stream.poll() is None
            time.sleep(0.02)
        lesson.run("kill -9")
        stream.communicate(timeout=_LIMIT_S)
        assert stream.returncode == 0
        assert lesson.run("cmp") == "equal\n"
        assert size < _size(tmp_path / "killed.txt"), "it was killed after the stream"
        up.read_lines(1)
        assert lesson.left == []


@pytest.mark.long
def test_steps_and_reasons(tmp_path: Path) -> None:
    """Lessons 3 and 4: steps of a request, the lab's address, and two waits with the limit that ends them."""
    with started(3, tmp_path) as (lesson, _):
        lesson.run("quire generate")
        steps = re.findall(r"^  (prefill|decode) ", lesson.run("quire steps"), re.M)
        assert steps == ["prefill", *["decode"] * 5]
        assert "16 tokens" in lesson.run("quire blocks")
        assert "http://127.0.0.1:" in lesson.run("quire lab")
        assert lesson.left == []
    with started(4, tmp_path) as (lesson, _):
        assert "max_num_seqs = 1" in lesson.run("quire set-policy")
        lesson.run("for name")
        assert all(json.loads((tmp_path / f"{name}.json").read_text())["id"] for name in ("first", "second", "third"))
        assert lesson.run("quire why").count("RUNNING") == 3
        assert "max_num_seqs=" in lesson.run("quire why second --what-if")
        assert "max_num_seqs = 256" in lesson.run("quire set-policy")
        assert lesson.left == []


@pytest.mark.long
def test_policies(tmp_path: Path) -> None:
    """Lesson 5: its program prints what the page shows, and a policy file serves."""
    lesson = Lesson(5, tmp_path, {}, {})
    assert "vllm-v1" in lesson.run("quire policies")
    lesson.save("python", "compare.py")
    assert lesson.run("python compare.py") == lesson.take("text")
    lesson.save("yaml", "mine.yaml")
    assert lesson.run("python compare.py mine.yaml").startswith("mine.yaml: 12 steps")
    options = lesson.take("sh", "quire up").split()[2:]
    assert lesson.left == []
    with UpProcess(*options[:-1], str(tmp_path / options[-1])) as up:
        up.wait_ready()


@pytest.mark.long
def test_structured_output(tmp_path: Path) -> None:
    """Lesson 6: what is printed matches the schema, the pattern, the choice and the tool's parameters."""
    with started(6, tmp_path) as (lesson, _):
        lesson.save("json", "person.json")
        schema, text = json.loads((tmp_path / "person.json").read_text()), lesson.run("quire generate")
        for _ in range(2):
            person, end = json.JSONDecoder().raw_decode(text.lstrip())
            jsonschema.validate(person, schema)
            text = text.lstrip()[end:]
        number, colour = lesson.run("quire generate").splitlines()
        assert re.fullmatch(r"\+[0-9]{2} [0-9]{3} [0-9]{4}", number) and colour in {"blue", "grey"}
        [call] = json.loads(lesson.run("curl"))["choices"][0]["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["city"] in {"Paris", "Rome"} and 1 <= arguments["days"] <= 7
        assert [kind for kind, _ in lesson.left] == ["json"]


@pytest.mark.long
def test_recordings(tmp_path: Path) -> None:
    """Lesson 7: a recording of a load is replayed, simulated under a limit, and shown by the lab."""
    with started(7, tmp_path) as (lesson, _):
        lesson.run("quire bench")
        lesson.run("quire record")
        assert lesson.run("quire replay").startswith("identical: ")
        assert "max_num_seqs=2" in lesson.run("quire replay")
        lab = lesson.begin("quire lab --recording")
        assert lab.stdout is not None
        url = re.search(r"http://\S+", lab.stdout.readline())
        assert url is not None and httpx.get(url[0], timeout=60).status_code == 200
        os.killpg(lab.pid, signal.SIGINT)
        lab.communicate(timeout=_LIMIT_S)
        assert lesson.left == []


@pytest.mark.long
def test_several_workers(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Lesson 8: both workers run steps, one is drained under load, and no request fails."""
    with started(8, tmp_path, "--workers", "2") as (lesson, _):
        assert lesson.take("sh", "quire up") == "quire up --workers 2\n"
        assert lesson.run("quire workers").count("ready") == 2
        lesson.run("quire bench")
        assert {"lane 0", "lane 1"} <= set(re.findall(r"lane \d", lesson.run("quire steps")))
        load = lesson.begin("quire bench")
        assert "drained" in lesson.run("quire drain")
        printed, errors = load.communicate(timeout=_LIMIT_S)
        assert load.returncode == 0, (printed, errors)
        lesson.run("quire drain")
        assert "blocks hold" in lesson.run("quire plan")
        assert lesson.left == []
    record_property("size", f"{len(LESSONS)} lessons of the tutorial, as written")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
