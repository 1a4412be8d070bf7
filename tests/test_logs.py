"""Lines of a service: whole, about one request, and without anything that a client said."""

import json
import logging

import pydantic
import pytest

from paceline import logs
from paceline.config import LogConfig
from paceline.errors import EngineError, PacelineError
from paceline.router.session import Session
from paceline.types import SamplingParams, SpeculationParams

SECRET = 'my "secret" prompt\nabout Ülrike'

log = logging.getLogger("paceline.test")


@pytest.fixture(autouse=True)
def restored():
    """Logging as it was before the test."""
    root, own = logging.getLogger(), logging.getLogger("paceline")
    handlers, levels = root.handlers[:], (root.level, own.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])


def objects(capsys):
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def forms(text):
    return (text, repr(text)[1:-1], json.dumps(text)[1:-1], text.encode().hex(), "Ülrike", "secret")


class TestJson:
    def test_one_object_per_line(self, capsys):
        logs.configure_service(LogConfig(json=True), replica_id="router-0")
        log.info("opened on %s\nand more", "target-1", extra={"epoch": 2, "nodes": (1, 2)})
        log.debug("not printed")
        (line,) = objects(capsys)
        assert line.pop("time").endswith("Z")
        assert line == {
            "level": "INFO",
            "logger": "paceline.test",
            "message": "opened on target-1\nand more",
            "replica_id": "router-0",
            "epoch": 2,
            "nodes": [1, 2],
        }

    def test_extra_fields_never_replace_the_line_s_own(self, capsys):
        logs.configure_service(LogConfig(json=True))
        log.info("hello", extra={"level": "fake", "time": 0, "unprintable": object})
        (line,) = objects(capsys)
        assert line["level"] == "INFO"
        assert line["time"] != 0
        assert "object" in line["unprintable"]

    def test_what_a_library_adds_to_every_record_is_not_printed(self, capsys):
        factory = logging.getLogRecordFactory()

        def adding(*args, **kwargs):
            record = factory(*args, **kwargs)
            record.package = "theirs"
            return record

        logs.configure_service(LogConfig(json=True))
        logging.setLogRecordFactory(adding)
        try:
            log.info("hello", extra={"k": 1})
        finally:
            logging.setLogRecordFactory(factory)
        (line,) = objects(capsys)
        assert line.keys() == {"time", "level", "logger", "message", "k"}

    def test_other_libraries_write_objects_too_from_warnings_on(self, capsys):
        logs.configure_service(LogConfig(level="DEBUG", json=True))
        logging.getLogger("asyncio").warning("slow")
        logging.getLogger("asyncio").info("not printed")
        assert [line["logger"] for line in objects(capsys)] == ["asyncio"]

    def test_configuring_again_does_not_print_twice(self, capsys):
        logs.configure(logging.INFO)
        logs.configure_service(LogConfig())
        logs.configure_service(LogConfig(json=True))
        log.info("once")
        assert [line["message"] for line in objects(capsys)] == ["once"]
        assert logs.level() == logging.INFO

    def test_errors_with_their_causes(self, capsys):
        logs.configure_service(LogConfig(json=True))
        try:
            try:
                raise KeyError("inner")
            except KeyError as error:
                raise EngineError("the target died") from error
        except EngineError:
            log.exception("failed")
            log.warning("failed", exc_info=True)
        failed, warned = objects(capsys)
        assert failed["error"] == "EngineError: the target died"
        assert failed["traceback"].index("KeyError: 'inner'") < failed["traceback"].index("EngineError: the target")
        assert "test_logs.py" in failed["traceback"]
        assert warned["error"] == failed["error"]
        assert "traceback" not in warned


class TestPlain:
    def test_a_readable_line(self, capsys):
        logs.configure_service(LogConfig(), replica_id="target-1")
        ids = {"request_id": "r1", "session_id": "s1"}
        log.warning("no draft\nfor now", extra={"reason": "it hangs", "epoch": 3, **ids})
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(
            "Z WARNING paceline.test: no draft\\nfor now request_id=r1 session_id=s1 replica_id=target-1 "
            'reason="it hangs" epoch=3'
        )

    def test_a_client_s_request_id_cannot_forge_a_line(self, capsys):
        logs.configure_service(LogConfig())
        log.info("hello", extra={"request_id": "r1\n2026-01-01T00:00:00.000Z ERROR paceline: forged"})
        assert len(capsys.readouterr().err.splitlines()) == 1

    def test_the_command_line_keeps_its_sentences(self, capsys):
        logging.getLogger().handlers[:] = []
        logs.configure(logging.INFO)
        try:
            raise EngineError("x")
        except EngineError:
            log.exception("a sentence")
        assert capsys.readouterr().err == "paceline: a sentence\n"


class TestSecrets:
    @pytest.mark.parametrize("prompt", [SECRET, SECRET * 20])
    @pytest.mark.parametrize("as_json", [False, True])
    def test_nothing_of_the_prompt_is_in_the_lines_of_a_failing_request(self, as_json, prompt, capsys):
        """Every way in which a request can fail, with errors that quote what they were given, whole or in part."""
        logs.configure_service(LogConfig(level="DEBUG", json=as_json))
        told = []

        class Body(pydantic.BaseModel):
            prompt: int

        def pydantic_quotes_its_input():
            Body(prompt=prompt)

        def in_a_cause():
            try:
                pydantic_quotes_its_input()
            except pydantic.ValidationError as error:
                raise EngineError("cannot read the prompt") from error

        def sampling():
            SamplingParams(seed=prompt)

        def empty_stop():
            Session("s", [1], SamplingParams(), SpeculationParams(), decode=lambda ids: prompt, stop=("",))

        def another_library():
            raise ValueError(f"cannot encode {prompt!r} or {prompt}")

        for fail in (pydantic_quotes_its_input, in_a_cause, sampling, empty_stop, another_library):
            try:
                fail()
            except Exception as error:
                logs.unexpected(log, error)
                if not isinstance(error, pydantic.ValidationError | PacelineError):
                    continue
                log.exception("request failed: %s", error)
                log.warning("request failed", extra={"why": error})
                log.error(error)
                if isinstance(error, PacelineError):
                    told.append(str(error))
        printed = capsys.readouterr().err
        assert printed.count("request failed") >= 8
        assert printed.count("unexpected error in a request: ValueError") == 1
        assert "in another_library" in printed
        assert told == [
            "cannot read the prompt",
            "a stop string is empty: each needs at least one character",
        ]
        for form in forms(prompt):
            assert form not in printed
            assert not any(form in text for text in told)
