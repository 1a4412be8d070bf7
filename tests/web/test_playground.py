"""The page at ``/`` without a browser: its files and headers, the state of the service, and the trace of rounds."""

import asyncio
import re
from functools import partial
from importlib.resources import files

import pytest
from tests.security.conftest import digest, write_keys
from tests.support.models import prompt
from tests.web.support import call, edge_over, events, refusal, served

from paceline.messages import InFlight, Node, Nodes
from paceline.router.trace import Tracer
from paceline.rpc.streams import decode_from_draft, encode_from_draft
from paceline.security.keys import KeyRing
from paceline.types import Mode

STATIC = {file.name: file.read_text(encoding="utf-8") for file in (files("paceline.web") / "static").iterdir()}
SPECULATION = {"include_speculation": True, "include_trace": True}


@pytest.fixture(scope="module")
def page(pipeline):
    """A service with the state of the pipeline behind it."""
    with served(edge_over(pipeline, status=partial(asyncio.to_thread, pipeline.server_info))) as url:
        yield url


def test_the_page_and_what_it_loads_are_served_from_here_alone(page):
    status, headers, body = call(f"{page}/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert body.decode() == STATIC["index.html"]
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert set(re.findall(r"-src ([^;]*)", policy)) <= {"'none'", "'self'"}
    assert "unsafe" not in policy
    named = {f"playground/{name}" for text in STATIC.values() for name in re.findall(r'from "\./([\w.]+)"', text)}
    named |= set(re.findall(r'(?:src|href)="([^#"]+)"', STATIC["index.html"]))
    assert {name.rpartition("/")[2] for name in named} == STATIC.keys() - {"index.html"}
    for name in named:
        status, headers, body = call(f"{page}/{name}")
        assert (status, body.decode()) == (200, STATIC[name.rpartition("/")[2]]), name
        assert headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"https?://(?!www\.w3\.org/)", "".join(STATIC.values()))
    assert not re.search(r"\son\w+=|\sstyle=|innerHTML|eval\(", "".join(STATIC.values()))


def test_it_is_loaded_again_only_when_it_has_changed(page):
    _, headers, _ = call(f"{page}/")
    assert headers["cache-control"] == "no-cache"
    assert call(f"{page}/", headers={"if-none-match": headers["etag"]})[::2] == (304, b"")
    assert call(f"{page}/", headers={"if-none-match": '"another"'})[0] == 200
    assert call(f"{page}/", method="HEAD")[::2] == (200, b"")


def test_it_can_be_switched_off_and_is_encrypted_where_all_is(pipeline):
    with served(edge_over(pipeline, playground=False)) as url:
        assert call(f"{url}/")[0] == 404
        assert call(f"{url}/playground/main.js")[0] == 404
        assert call(f"{url}/v1/status")[0] == 404  # nobody knows it here
    with served(edge_over(pipeline, require_tls=True)) as url:
        status, _, body = call(f"{url}/")
        assert (status, body["error"]["type"]) == (403, "permission_error")
        assert call(f"{url}/", headers={"paceline-tls": "1"})[0] == 200


def test_the_state_is_for_those_who_have_a_key(pipeline, tmp_path):
    keys = KeyRing(write_keys(tmp_path / "keys.yaml", {"name": "alice", "sha256": digest("key-of-alice")}))
    with served(edge_over(pipeline, keys=keys, status=partial(asyncio.to_thread, pipeline.server_info))) as url:
        assert call(f"{url}/")[0] == 200
        assert call(f"{url}/v1/status")[0] == 401
        assert call(f"{url}/v1/status", headers={"authorization": "Bearer key-of-alice"})[0] == 200


def test_the_state_counts_what_has_run(page, pipeline):
    asked = {"prompt": list(prompt(3, 20)), "max_tokens": 24, "ignore_eos": True, "speculation": {"mode": "sequential"}}
    assert call(f"{page}/v1/completions", asked)[0] == 200
    status, headers, state = call(f"{page}/v1/status")
    assert (status, headers["cache-control"]) == (200, "no-store")
    assert (state["sessions_running"], state["sessions_queued"], state["starting"]) == (0, 0, [])
    assert state["acceptance_rate"] > 0
    assert state["acceptance_length"] > 1
    (target,), (draft,) = state["pools"]["target"], state["pools"]["draft"]
    assert (target["kind"], target["num_sessions"], target["max_sessions"]) == ("target", 0, 8)
    assert (draft["kind"], draft["num_sessions"]) == ("draft", 0)
    assert "/" not in target["model"] + draft["model"]  # no path of this machine
    generation = pipeline.submit(prompt(3, 20), speculation=None)
    try:
        held = pipeline.server_info()
        assert held.sessions_running == held.pools["target"][0].num_sessions == 1
    finally:
        generation.cancel()


def test_a_trace_without_what_it_belongs_to_is_refused(page):
    asked = {"prompt": "lazy", "stream": True, "stream_options": {"include_trace": True}}
    assert "include_trace is true without include_speculation" in refusal(f"{page}/v1/completions", asked)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_trace_says_what_was_verified_and_when(page, mode):
    asked = {"prompt": list(prompt(5, 30)), "max_tokens": 32, "ignore_eos": True, "speculation": {"mode": mode}}
    asked |= {"stream": True, "return_token_ids": True, "stream_options": SPECULATION}
    choices = [choice for event in events(f"{page}/v1/completions", asked)[:-1] for choice in event["choices"]]
    rounds = [(choice["speculation"], choice["token_ids"]) for choice in choices if choice.get("token_ids")]
    assert sum(len(tokens) for _, tokens in rounds) == 32
    nodes, last, num_matched = {}, 0.0, 0
    for told, tokens in rounds:
        counts, trace = told["round"], told["trace"]
        assert last <= trace["began_s"] <= trace["ended_s"]
        last = trace["ended_s"]
        for step in trace["draft"]:
            assert 0 <= step["at_s"] <= last
            nodes |= {node_id: (parent, token) for node_id, parent, token, _, _ in step["nodes"]}
        ours = [nodes[node_id] for node_id in trace["in_flight"] if node_id in nodes]
        if counts["accepted"] and not counts["lookup"]:
            assert tokens[: counts["accepted"]] == [token for _, token in ours][: counts["accepted"]]
            num_matched += 1
    assert rounds[0][0]["trace"]["draft_opened_at"] == 0
    if mode is Mode.PLAIN:
        assert not nodes
    if mode is Mode.SEQUENTIAL:
        assert num_matched > 0


def test_no_trace_is_made_unless_it_is_asked_for(page):
    asked = {"prompt": "lazy", "max_tokens": 4, "stream": True, "stream_options": {"include_speculation": True}}
    choices = [choice for event in events(f"{page}/v1/completions", asked)[:-1] for choice in event["choices"]]
    assert choices
    assert not any("trace" in choice["speculation"] for choice in choices)


def test_nodes_that_a_router_relays_unopened_are_traced_as_they_are():
    now = iter(range(100))
    tracer = Tracer(lambda ids: f"<{ids[0]}>", 7, lambda: float(next(now)))
    tracer.on_open(9)
    sent = Nodes("s", 0, 9, (Node(1, 0, 41, 0.5), Node(2, 1, 42, 0.25)), step_s=0.5)
    (relayed,), _, dropped = decode_from_draft(encode_from_draft([sent]))
    assert dropped == 0
    tracer.on_nodes(relayed)
    tracer.on_in_flight(InFlight("s", 0, 9, (1, 2)))
    tracer.on_outcome()
    trace = tracer.take()
    (step,) = trace.steps
    assert [(node.node_id, node.parent_id, node.token_id, node.text) for node in step.nodes] == [
        (1, 0, 41, "<41>"),
        (2, 1, 42, "<42>"),
    ]
    assert (step.step_s, trace.in_flight, trace.draft_opened_at) == (0.5, (1, 2), 2)
    assert step.at_s < trace.began_s < trace.ended_s
