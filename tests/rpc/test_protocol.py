"""The protocol against the recorded one of the version before: what that said is understood, and it understands us.

``record.py`` wrote the record with the code of that version. Mutants of the rules are in ``BREAKS``; of the code: the
bytes of columns in another order, a field that is sent unasked, ``needed`` that knows no field, ``restored`` without
defaults, an opening with unknown fields that is taken.
"""

import json
import pickle
from dataclasses import fields, replace

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st
from tests.rpc import record
from tests.rpc.test_streams import from_draft, from_target, to_draft, to_target
from tests.support.messages import statuses

from paceline.config import RouterConfig
from paceline.errors import InvalidRequestError
from paceline.fleet.report import Report
from paceline.messages import Nodes, OpenSession, RelayedNodes, SessionFailed
from paceline.rpc import protocol, streams
from paceline.rpc.generation import request_from_proto
from paceline.types import PoolScaling, ReplicaStatus, RouterView, SamplingParams, ServerInfo, Startup
from paceline.v1 import draft_pb2, generation_pb2, target_pb2, types_pb2

BEFORE = protocol.VERSION - 1
RECORDED = FileDescriptorSet.FromString((record.FOLDER / f"{BEFORE}.binpb").read_bytes())
SAID = json.loads((record.FOLDER / f"{BEFORE}.json").read_text())
IGNORED = {
    "ReplicaStatus.version": "status.24",
    "ReplicaStatus.protocol": "status.25",
    "ReplicaStatus.numerics": "status.26",
    "OpenSession.suspected_s": "commands.open_session.11",
    "OpenSession.pages_from": "commands.open_session.12",
    "OpenSession.pages_timeout_s": "commands.open_session.13",
    "SessionFailed.turned_away": "events.session_failed.5",
    "GenerateStreamChunk.earlier_rounds": "12",
}
"""New fields that a peer of the version before may leave unread: it acts as it always has. With their places."""

NEW_CALLS = {"PagesRequest", "PagesPart", "PagePlaces"}
"""Messages of calls that a peer of the version before does not know: it gives no pages, which are computed then."""

TYPES = {
    "to_target": target_pb2.ToTarget,
    "from_target": target_pb2.FromTarget,
    "to_draft": draft_pb2.ToDraft,
    "from_draft": draft_pb2.FromDraft,
}
DECODERS = {
    "to_target": streams.decode_to_target,
    "from_target": streams.decode_from_target,
    "to_draft": streams.decode_to_draft,
    "from_draft": streams.decode_from_draft,
}


def recorded_classes():
    pool = DescriptorPool()
    for file in RECORDED.file:
        pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"paceline.v1.{name}")) for name in (*NESTED, "Nodes")}


NESTED = [kind.DESCRIPTOR.name for kind in TYPES.values()]
OLD = recorded_classes()


def current():
    files = FileDescriptorSet()
    for module in (types_pb2, target_pb2, draft_pb2, generation_pb2):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    return files


# -- the rules ---------------------------------------------------------------------------------------------------------


def messages_of(files):
    """Every message by its name, those inside others too."""
    found = {}

    def add(prefix, messages):
        for message in messages:
            found[prefix + message.name] = message
            add(f"{prefix}{message.name}.", message.nested_type)

    for file in files.file:
        add("", file.message_type)
    return found


def shape(message, field):
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
    return field.name, field.type, field.label, field.type_name, oneof, field.proto3_optional


def reserves(message, number):
    return any(span.start <= number < span.end for span in message.reserved_range)


def breaks(old, new):
    """What peers of the old version would misread."""
    found = []
    ours, theirs = messages_of(new), messages_of(old)
    for name, before in theirs.items():
        if name not in ours:
            found.append(f"{name} is gone")
            continue
        after = ours[name]
        known = {field.number: shape(after, field) for field in after.field}
        for field in before.field:
            if field.number in known:
                if known[field.number] != shape(before, field):
                    found.append(f"{name}.{field.name} has changed")
            elif not reserves(after, field.number):
                found.append(f"{name}.{field.name} is gone and its number is not reserved")
        found += [f"{name} uses the reserved number {number}" for number in known if reserves(before, number)]
    for kind in ("enum_type", "service"):
        have = {each.name: each for file in new.file for each in getattr(file, kind)}
        for file in old.file:
            for each in getattr(file, kind):
                parts = "value" if kind == "enum_type" else "method"
                now = [] if each.name not in have else getattr(have[each.name], parts)
                lost = [part.name for part in getattr(each, parts) if part not in now]
                found += [f"{each.name}.{name} is gone or has changed" for name in lost]
    return found


def fields_of(files):
    return {f"{name}.{field.name}" for name, message in messages_of(files).items() for field in message.field}


def test_the_protocol_of_the_version_before_still_holds():
    assert breaks(RECORDED, current()) == []


BREAKS = {
    "a field has another number": lambda m, f: setattr(m["Outcome"].field[2], "number", 90),
    "a double becomes a float": lambda m, f: setattr(m["Outcome"].field[4], "type", FieldDescriptorProto.TYPE_FLOAT),
    "one becomes several": lambda m, f: setattr(m["Commit"].field[1], "label", FieldDescriptorProto.LABEL_REPEATED),
    "a field takes another's name": lambda m, f: setattr(m["Commit"].field[3], "name", "in_flight"),
    "a field is gone": lambda m, f: m["States"].field.pop(),
    "a reserved number is used": lambda m, f: m["TargetCommand"].field.add(name="new", number=4, type=3, label=1),
    "a scalar loses its presence": lambda m, f: setattr(m["SamplingParams"].field[0], "proto3_optional", False),
    "a message of a choice stands alone": lambda m, f: m["TargetEvent"].field[0].ClearField("oneof_index"),
    "a message is gone": lambda m, f: f.file[2].message_type.pop(),
    "a cause has another number": lambda m, f: setattr(f.file[0].enum_type[0].value[3], "number", 40),
    "a stream becomes one answer": lambda m, f: f.file[1].service[0].method[0].ClearField("server_streaming"),
    "a method is gone": lambda m, f: f.file[3].service[0].method.pop(),
}


@pytest.mark.parametrize("change", BREAKS.values(), ids=BREAKS)
def test_the_rules_notice_what_peers_would_misread(change):
    files = current()
    change(messages_of(files), files)
    assert breaks(RECORDED, files)


def test_a_field_that_is_reserved_may_go():
    files = current()
    message = messages_of(files)["States"]
    number = message.field.pop().number
    message.reserved_range.append(DescriptorProto.ReservedRange(start=number, end=number + 1))
    assert breaks(RECORDED, files) == []


def test_every_new_field_is_told_to_those_who_know_it_alone_or_may_be_ignored():
    new = {name for name in fields_of(current()) - fields_of(RECORDED) if name.partition(".")[0] not in NEW_CALLS}
    assert new == IGNORED.keys() | {f"SamplingParams.{name}" for name in protocol.SINCE}
    assert set(protocol.SINCE.values()) <= {protocol.VERSION}, "what the version before knows needs no entry"


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", TYPES)
def test_what_the_version_before_said_is_understood(direction):
    batch = TYPES[direction].FromString(bytes.fromhex(SAID["batches"][direction]))
    messages, *status, num_dropped = DECODERS[direction](batch)
    expected = record.directions()[direction]
    if direction == "from_draft":
        messages = [streams.unpacked(each) if isinstance(each, RelayedNodes) else each for each in messages]
    messages = [replace(each, nodes=tuple(each.nodes)) if isinstance(each, Nodes) else each for each in messages]
    assert (messages, num_dropped) == (expected, 0)
    assert status in ([], [record.statuses()[0]])


BATCHES = {"to_target": to_target, "from_target": from_target, "to_draft": to_draft, "from_draft": from_draft}


@pytest.mark.parametrize("direction", TYPES)
@given(data=st.data())
def test_what_is_said_now_the_version_before_knows(direction, data):
    """To the last field: what it does not know it would drop without a word."""
    messages = data.draw(BATCHES[direction])
    messages = [m for m in messages if not isinstance(m, OpenSession) or protocol.needed(m.sampling) <= BEFORE]
    batch = record.ENCODERS[direction](messages, data.draw(st.none() | statuses))
    old = OLD[TYPES[direction].DESCRIPTOR.name].FromString(batch.SerializeToString())
    assert set(protocol.unknown_fields(old)) <= set(IGNORED.values())
    for message in messages:
        if isinstance(message, Nodes):
            (update,) = streams.encode_to_target([message]).commands
            (packed,) = update.tree_updates.nodes
            assert not [*protocol.unknown_fields(OLD["Nodes"].FromString(packed))]


def test_a_parameter_that_the_version_before_does_not_know_is_seen():
    start = replace(record.opens()[0], sampling=SamplingParams(seed=1, logprob_token_ids=(4,)))
    assert protocol.needed(start.sampling) == protocol.VERSION > protocol.needed(record.opens()[1].sampling)
    old = OLD["ToTarget"].FromString(streams.encode_to_target([start]).SerializeToString())
    assert [*protocol.unknown_fields(old)] == ["commands.open_session.sampling.24"]


# -- newer peers -------------------------------------------------------------------------------------------------------


NEWER = b"\xd2\x09\x03abc"  # field 154
DEEPER = b"\x92\x01\x06" + NEWER  # within structured_output


@pytest.mark.parametrize(("added", "field"), [(NEWER, "154"), (DEEPER, "structured_output.154")])
def test_a_target_answers_an_opening_that_asks_for_what_it_does_not_know(added, field):
    batch = streams.encode_to_target([record.opens()[0]])
    batch.commands[0].open_session.sampling.MergeFromString(added)
    reason = f"sampling.{field} is set: this version of Paceline does not know the field"
    assert streams.decode_to_target(batch) == ([SessionFailed("s1", 1, reason)], 0)


def test_a_draft_may_guess_without_it():
    batch = streams.encode_to_draft([record.opens()[0]])
    batch.commands[0].open_session.sampling.MergeFromString(NEWER)
    assert streams.decode_to_draft(batch) == ([record.opens()[0]], 0)


@pytest.mark.parametrize("part", ["sampling_params", ""])
def test_a_request_that_asks_for_what_is_not_known_is_refused(part):
    message = generation_pb2.GenerateRequest(text="a")
    (getattr(message, part) if part else message).MergeFromString(NEWER)
    with pytest.raises(InvalidRequestError) as refused:
        request_from_proto(message)
    assert str(refused.value) == f"{part and part + '.'}154 is set: this version of Paceline does not know the field"


def test_speculation_that_is_not_known_changes_no_token():
    message = generation_pb2.GenerateRequest(text="a")
    message.speculation.MergeFromString(b"\x2a\x07uniform")  # what field 5 was
    assert request_from_proto(message).prompt == "a"


# -- versions ----------------------------------------------------------------------------------------------------------


def test_one_version_older_or_newer_is_talked_to_and_no_other():
    spoken = [version for version in range(20) if not protocol.refusal(version)]
    assert spoken == [protocol.VERSION - 1, protocol.VERSION, protocol.VERSION + 1]
    said = "paceline-protocol is 9: 2 is spoken here, and 1 to 3 are accepted; upgrade by one version after the other"
    assert protocol.refusal(9) == said


def test_a_router_states_its_version_or_is_of_the_first():
    assert protocol.stated(None) == protocol.stated((("other", "5"),)) == 1
    assert protocol.stated((("paceline-protocol", "12"),)) == 12
    for wrong in ("", "two", "-1", "2.0", "9" * 50, "²"):
        with pytest.raises(ValueError, match="paceline-protocol is"):
            protocol.stated((("paceline-protocol", wrong),))


# -- pickled values ----------------------------------------------------------------------------------------------------

PICKLED = (Report, ReplicaStatus, RouterView, Startup, PoolScaling, ServerInfo)


def test_what_the_version_before_pickled_is_read_and_new_fields_have_their_defaults():
    found = [pickle.loads(bytes.fromhex(text)) for text in SAID["pickled"]]
    assert found == record.pickled()
    assert found[0].status.protocol == 1


@pytest.mark.parametrize("kind", PICKLED, ids=lambda kind: kind.__name__)
def test_new_fields_of_pickled_values_come_last(kind):
    """A process of the version before reads values by their order."""
    before = SAID["fields"][kind.__name__]
    assert [each.name for each in fields(kind)][: len(before)] == before


def test_what_a_newer_version_has_pickled_is_read_without_what_it_added():
    status = record.statuses()[0]
    newer = ReplicaStatus.__new__(ReplicaStatus)
    newer.__setstate__([*(getattr(status, each.name) for each in fields(status)), "added"])
    assert newer == status
    config, options = RouterConfig(), RouterConfig(max_queued_requests=5)
    config.__setstate__(options.__getstate__() | {"__dict__": {"added": 1, "max_queued_requests": 5}})
    assert config == options
    assert not hasattr(config, "added")
