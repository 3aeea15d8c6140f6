"""How a replica is chosen, and how replicas' facts are joined; none of it needs Ray."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ingot.adapters.ray.merged_answers import ReplicaAnswer, merged
from ingot.adapters.ray.ray_settings import RayArgs
from ingot.adapters.ray.replica_choice import model_and_key, ranked
from ingot.errors import ConfigError
from ingot.serve.api_errors import ApiError
from ingot.serve.engine_calls.process_protocol import Gauges
from ingot.serve.engine_calls.server_metrics import Metrics

IDLE = dict.fromkeys("abcd", 0)
KEYS = [f"key {i}" for i in range(400)]
SYSTEM = {"role": "system", "content": "Be brief. " * 20}


def key(size: int = 256, **body: Any) -> str:
    return model_and_key(json.dumps(body).encode(), size)[1]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class TestKeys:
    def test_the_beginning_decides(self) -> None:
        long = "A fire broke out. " * 40
        assert key(prompt=long + "one") == key(prompt=long + "two") == key(prompt=[long + "three", "Other"])
        assert key(prompt=long) != key(prompt="B" + long)
        ids = list(range(300))
        assert key(prompt=[*ids, 1]) == key(prompt=[*ids, 2]) == key(prompt=[[*ids, 3], [9]])
        assert key(prompt=ids) != key(prompt=ids[1:])
        assert key(input=long) == key(input=[long, "Other"])

    def test_a_short_prompt_is_hashed_completely(self) -> None:
        assert key(prompt="Hi") != key(prompt="Hi there")

    def test_turns_of_a_conversation_go_to_the_same_replica(self) -> None:
        turn = [user("Hi"), {"role": "assistant", "content": "Hello"}, user("What is 12 + 30?")]
        assert key(messages=turn[:1]) == key(messages=turn) != key(messages=turn[2:])

    def test_a_long_system_prompt_is_shared(self) -> None:
        size = len(json.dumps([SYSTEM])) // 2
        assert key(size, messages=[SYSTEM, user("Hi")]) == key(
            size, messages=[SYSTEM, user("What is 1 + 1?")]
        )
        assert key(10_000, messages=[SYSTEM, user("Hi")]) != key(10_000, messages=[SYSTEM, user("Ho")])

    def test_text_parts(self) -> None:
        parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
        assert key(messages=parts) != ""

    @pytest.mark.parametrize(
        "data", [b"", b"{", b"[]", b"7", b'{"model": 3}', b"\xff", b"[" * 100_000, b'{"prompt": "\\ud800"}']
    )
    def test_invalid_requests_have_no_key(self, data: bytes) -> None:
        assert model_and_key(data, 256) == (None, "")

    @pytest.mark.parametrize("prompt", [None, "", [], [[]], 0])
    def test_no_prompt_has_no_key(self, prompt: Any) -> None:
        assert model_and_key(json.dumps({"model": "m", "prompt": prompt}).encode(), 256) == ("m", "")

    @pytest.mark.parametrize("prompt", [[None], [{"a": 1}], 7, [1, "a"], {"a": 1}, [1.5]])
    def test_an_odd_prompt_is_the_engines_to_refuse(self, prompt: Any) -> None:
        assert model_and_key(json.dumps({"model": "m", "prompt": prompt}).encode(), 256)[0] == "m"


class TestChoice:
    def test_equal_keys_have_equal_orders(self) -> None:
        assert ranked("k", IDLE, 8) == ranked("k", dict(reversed(IDLE.items())), 8)

    def test_keys_are_spread(self) -> None:
        firsts = Counter(ranked(one, IDLE, 8)[0] for one in KEYS)
        assert set(firsts) == set(IDLE)
        assert min(firsts.values()) > len(KEYS) / len(IDLE) * 0.7

    def test_only_the_keys_of_a_lost_replica_move(self) -> None:
        left = dict.fromkeys("abc", 0)
        for one in KEYS:
            before = [name for name in ranked(one, IDLE, 8) if name != "d"]
            assert ranked(one, left, 8) == before

    def test_a_busy_replica_is_passed_over_at_the_bound(self) -> None:
        first, second, *_ = ranked("k", IDLE, 8)
        assert ranked("k", {**IDLE, first: 7}, 8)[0] == first
        assert ranked("k", {**IDLE, first: 8}, 8) == [*ranked("k", IDLE, 8)[1:], first]
        assert ranked("k", {**IDLE, first: 9, second: 8}, 8)[-2:] == [second, first]

    def test_it_is_the_imbalance_that_counts(self) -> None:
        first = ranked("k", IDLE, 8)[0]
        busy = dict.fromkeys(IDLE, 50)
        assert ranked("k", {**busy, first: 57}, 8)[0] == first

    def test_one_key_fills_all_replicas_evenly(self) -> None:
        loads = dict(IDLE)
        for _ in range(200):
            loads[ranked("k", loads, 8)[0]] += 1
        assert max(loads.values()) - min(loads.values()) <= 8

    def test_none(self) -> None:
        assert ranked("k", {}, 8) == []


class TestFacts:
    def test_metrics_of_replicas_are_merged_with_labels(self) -> None:
        texts = {}
        for replica, hits in (("r1", 64), ("r2", 128)):
            metrics = Metrics()
            metrics.of("m").prefix_cache(Gauges(), Gauges(prefix_queries=200, prefix_hits=hits))
            metrics.latency.labels("m").observe(0.3)
            texts[replica] = whole(metrics.text(), kind=b"text/plain; version=0.0.4")
        answer = merged("/metrics", {"m": texts})
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = bytes(answer.body).decode()
        assert text.count("# TYPE ingot_prefix_cache_hits_total counter") == 1
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        found = {s.labels["replica"]: s.value for s in samples if s.name == "ingot_prefix_cache_hits_total"}
        assert found == {"r1": 64, "r2": 128}
        assert sum(s.value for s in samples if s.name == "ingot_e2e_request_latency_seconds_count") == 2

    def test_models_are_listed_once(self) -> None:
        lists = {n: whole(json.dumps({"data": [{"id": n}]}).encode()) for n in "mn"}
        answer = merged("/v1/models", {"m": {"r1": lists["m"], "r2": lists["m"]}, "n": {"r3": lists["n"]}})
        assert [one["id"] for one in json.loads(bytes(answer.body))["data"]] == ["m", "n"]

    def test_health_needs_a_healthy_replica_of_each_model(self) -> None:
        good, bad = whole(b'{"status": "ok"}'), whole(b"{}", status=503)
        assert merged("/health", {"m": {"r1": bad, "r2": good}}).status_code == 200
        for found in ({"m": {"r1": good}, "n": {"r2": bad}}, {"m": {"r1": good}, "n": {}}):
            with pytest.raises(ApiError, match="no healthy replica: n") as caught:
                merged("/health", found)
            assert caught.value.status == 503
        with pytest.raises(ApiError, match="no replica takes requests"):
            merged("/version", {"m": {}})


def whole(body: bytes, status: int = 200, kind: bytes = b"application/json") -> ReplicaAnswer:
    return ReplicaAnswer(status, {b"content-type": kind}, body)


class TestArguments:
    def test_names_and_limits(self) -> None:
        args = RayArgs.from_json({"engines": [{"path": "engines/a", "runtime": {"block_size": 32}}]})
        (engine,) = args.engines
        assert (engine.shown, engine.load().runtime["block_size"]) == ("a", 32)
        assert engine.load().path.endswith("/engines/a")

    @pytest.mark.parametrize(
        ("args", "text"),
        [
            ({"engines": []}, "at least one"),
            ({"engines": [{"path": "a"}, {"path": "b/a"}]}, "each once"),
            ({"engines": [{"path": "a"}], "most_ahead": 0}, "most_ahead"),
            ({"engines": [{"path": "a"}], "prefix_bytes": 0}, "prefix_bytes"),
            ({"engines": [{"path": "a"}], "max_body": 1}, "max_body"),
            ({"engines": [{"path": "a", "thread": 1}]}, "thread"),
            ({"engines": [{"path": "a", "runtime": {"block_size": 3}}]}, "block_size"),
            ({"engine": []}, "engine"),
        ],
    )
    def test_wrong_arguments_are_named(self, args: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            RayArgs.from_json(args)
