"""Templates that exceed their limits: each is one error, and the next prompt is rendered."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import RequestError, TokenizerError
from ingot.sandbox.limited_process import LimitedProcess, ProcessEndedError, ProcessLimits
from ingot.text.chat.chat_jinja import JinjaFormat
from tests.unit.chat_cases import CHATML, jinja, user

SANDBOX = "ingot.text.chat.template_sandbox"
LIMITS = ProcessLimits(seconds=0.3, memory=96 << 20)
GROW = "{%% set ns = namespace(v=%s) %%}{%% for i in range(64) %%}{%% set ns.v = %s %%}{%% endfor %%}%s"
SIZES = [
    "{{ 'x' * 10000000000 }}",
    "{{ 10000000000 * [0] }}",
    "{{ messages[0].content | replace('', 'x' * 9999) | replace('', 'x' * 9999) }}",
    "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "{{ messages | tojson(indent=10000000000) }}",
    "{{ ('x\n' * 99999) | indent(99999) }}",
    "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "{{ 'x' | center(10000000000) }}",
    "{{ 'x'.ljust(10000000000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ range(99999) | map('string') | map('center', 99999) | list | length }}",
    "{{ (['a' * 99999] * 99999) | join }}",
    "{{ 'a' | wordwrap(1, wrapstring='b' * 100000000000) }}",
    GROW % ("'xx'", "ns.v ~ ns.v", ""),
    GROW % ("'xx'", "ns.v + ns.v", ""),
    GROW % ("[0]", "ns.v + ns.v", ""),
    pytest.param(GROW % ("[0]", "[ns.v, ns.v]", "{{ ns.v }}"), marks=pytest.mark.slow),
    GROW % ("[0]", "[ns.v, ns.v]", "{{ ns.v | tojson }}"),
    "{% for i in range(10000) %}{{ messages[0].content * 1000 }}{% endfor %}",
]
TIMES = [
    "{{ 9 ** 999999999 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    pytest.param(
        "{% for i in range(99999) %}{{ '' if range(99999) | list | length else '' }}{% endfor %}",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "{% for i in range(99999) %}{% set x = ('a' * 99999).replace('a', 'b') %}{% endfor %}",
        marks=pytest.mark.slow,
    ),
    "{{ range(99999) | map('string') | map('center', 999) | sort | unique | list | length }}"
    "{% for i in range(99999) %}{{ '' if range(99999) | sum < 0 }}{% endfor %}",
]


@pytest.mark.parametrize("body", [*SIZES, *TIMES])
def test_a_limit_is_enforced(body: str) -> None:
    """Whatever the way: a message of a line, in the time and memory that were set."""
    with pytest.raises((RequestError, TokenizerError), match=r"here\.jinja") as error:
        JinjaFormat(body, "here.jinja", {}, LIMITS).prompt_text(user("abc"))
    reported = str(error.value)
    assert len(reported) < 400
    known = ("needs more than 96 MiB", "needs more than 0.3 seconds", "writes more than", "MAX_RANGE")
    assert any(text in reported for text in known) or "too big" in reported or "too large" in reported, (
        reported
    )


def test_the_limits_are_those_that_were_set() -> None:
    """Memory is limited once per process, time per answer."""
    with LimitedProcess("tests.unit.limits_worker", LIMITS) as process:
        for _ in range(2):
            found = process.ask(None)
            assert found.pop("seconds") == pytest.approx(LIMITS.seconds, abs=0.1)  # kernels round it
            assert found == {"memory": LIMITS.memory, "core": 0}


def test_the_next_prompt_is_rendered() -> None:
    bomb = "{{ messages[0].content * 10000000000 }}"
    body = f"{{% if messages[0].content == 'bomb' %}}{bomb}{{% endif %}}{{{{ messages[0].content }}}}"
    chat = JinjaFormat(body, "here.jinja", {}, LIMITS)
    for _ in range(2):
        with pytest.raises(RequestError, match="96 MiB"):
            chat.prompt_text(user("bomb"))
        assert chat.prompt_text(user("hello")) == "hello"


def test_large_texts_are_accepted() -> None:
    """A megabyte of conversation at the usual limits."""
    content = "é" * 1_000_000
    assert jinja(CHATML).prompt_text(user(content)).count("é") == len(content)


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"bytes", "\ud800", float],
    ids=["object", "set", "bytes", "surrogate", "class"],
)
def test_variables_that_are_not_json(value: Any) -> None:
    with pytest.raises(RequestError, match="JSON types"):
        jinja("{{ x }}").prompt_text(user("a"), variables={"x": value})


def test_messages_nested_too_deeply() -> None:
    deep: Any = []
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(RequestError, match=r"JSON types.*recursion"):
        jinja("{{ x }}").prompt_text(user("a"), variables={"x": deep})


def test_threads_share_one_process() -> None:
    """Every thread gets its own answer, also while others meet the limit."""
    bomb = "{{ (messages | length + 8) ** 999999999 }}"
    body = f"{{% if '7' in messages[0].content %}}{bomb}{{% endif %}}{{{{ messages[0].content }}}}"
    chat = JinjaFormat(body, "here.jinja", {}, ProcessLimits(seconds=0.1))
    wrong: list[str] = []

    def work(first: int) -> None:
        for number in range(first, first + 10):
            text = f"<{number}>"
            try:
                if chat.prompt_text(user(text)) != text or "7" in text:
                    wrong.append(text)
            except RequestError:
                if "7" not in text:
                    wrong.append(text)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_process_that_dies_is_reported_and_replaced() -> None:
    with LimitedProcess(SANDBOX, LIMITS) as process:
        assert process.ask({"source": "{{ 1 + 1 }}", "variables": {}}) == {"text": "2"}
        assert process._running is not None
        process._running.process.kill()
        with pytest.raises(ProcessEndedError, match="SIGKILL"):
            process.ask({"source": "", "variables": {}})
        assert process.ask({"source": "a", "variables": {}}) == {"text": "a"}


def test_an_interrupted_answer_reaches_no_other_caller() -> None:
    """Ctrl-C while a template renders: the next prompt is its own, not the one that was given up."""

    class Interrupted(BaseException):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    with LimitedProcess(SANDBOX, ProcessLimits(seconds=30)) as process:
        slow = "{% for i in range(99999) %}{% for j in range(40) %}{% endfor %}{% endfor %}given up"
        assert process.ask({"source": "ready", "variables": {}}) == {"text": "ready"}
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Interrupted):
                process.ask({"source": slow, "variables": {}})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert process.ask({"source": "the next", "variables": {}}) == {"text": "the next"}


def test_an_end_waits_for_no_question() -> None:
    """The current call fails, and so do those after it; the process does not answer, as if it hung."""
    process = LimitedProcess(SANDBOX, LIMITS)
    question = {"source": "a", "variables": {}}
    assert process.ask(question) == {"text": "a"}
    assert process._running is not None
    os.kill(process._running.process.pid, signal.SIGSTOP)
    why: list[str] = []

    def ask() -> None:
        with pytest.raises(ProcessEndedError) as caught:
            process.ask(question)
        why.append(str(caught.value))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    while not process._lock.locked():
        time.sleep(0.01)
    process.end()
    for thread in threads:
        thread.join(10)
    assert len(why) == 3
    with pytest.raises(ProcessEndedError, match="is not needed any more"):
        process.ask(question)


def test_a_worker_that_cannot_start_says_why() -> None:
    with (
        LimitedProcess("ingot.no_such_module", LIMITS) as process,
        pytest.raises(ProcessEndedError, match=r"exit code 1.*no_such_module"),
    ):
        process.ask({})


def test_the_process_ends_with_its_format() -> None:
    chat = jinja("a")
    assert chat._sandbox._running is not None
    pid = chat._sandbox._running.process.pid
    os.kill(pid, 0)
    del chat
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_process_ends_with_its_owner() -> None:
    """Also where the owner is killed, so that nothing of Python runs."""
    code = (
        "import os, signal; from tests.unit.chat_cases import jinja; chat = jinja('a'); "
        "print(chat._sandbox._running.process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[2]
    shown = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert ends(Path(f"/proc/{int(shown.stdout)}/status"), within=10)


def ends(status: Path, within: float) -> bool:
    """Whether the process of a /proc file ends within some seconds; a zombie has ended."""
    limit = time.monotonic() + within
    while time.monotonic() < limit:
        try:
            if "State:\tZ" in status.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_a_fork_has_a_process_of_its_own() -> None:
    chat = jinja("{{ messages[0].content }}")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if chat.prompt_text(user("child")) == "child" else 1
            chat._sandbox.close()
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert chat.prompt_text(user("parent")) == "parent"


def test_a_fork_does_not_wait_for_a_thread_that_it_lacks() -> None:
    """One that asks when the process forks."""
    chat = jinja("{{ messages[0].content }}")
    assert chat._sandbox._lock.acquire()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(10)
            status = 0 if chat.prompt_text(user("child")) == "child" else 1
            chat._sandbox.close()
        finally:
            os._exit(status)
    chat._sandbox._lock.release()
    assert os.waitpid(pid, 0)[1] == 0


def test_what_the_owner_did_to_signals_does_not_matter() -> None:
    """A thread that blocks SIGPROF hands the mask down; the limit holds all the same."""

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    try:
        with pytest.raises((RequestError, TokenizerError), match=r"0\.2 seconds"):
            JinjaFormat(TIMES[1], "here.jinja", {}, ProcessLimits(seconds=0.2)).prompt_text(user("a"))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
