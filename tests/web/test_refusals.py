"""What is not served is refused in the sentence of a page, by the name of its parameter, as its protocol refuses."""

from __future__ import annotations

import json

import pytest
from tests.support.golden import check_page, pages_beside
from tests.web.support import call

USER = [{"role": "user", "content": "hello"}]
BODIES = {
    "/v1/completions": {"prompt": "lazy", "max_tokens": 2},
    "/v1/chat/completions": {"messages": USER},
    "/v1/chat/completions/batch": {"messages": [USER]},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": USER, "max_tokens": 2000},
}
"""Path -> a request, of which the page names what is changed."""


@pytest.mark.parametrize("page", pages_beside(__file__), ids=lambda page: page.stem)
def test_what_is_not_served_is_refused_in_the_sentence_of_its_page(page, scripted, url):
    """``completions``: by a model; the others by a script."""

    def refused(line):
        path, _, changes = line.partition(" ")
        at = url if page.stem == "completions" else scripted[1]
        status, headers, answer = call(f"{at}{path}", BODIES[path] | json.loads(changes))
        error = answer["error"]
        assert "YAML" not in error["message"]
        assert (status, error["type"]) == (400, "invalid_request_error"), line
        if path != "/v1/messages":
            assert headers["x-request-id"]
            return f"{error['param']} | {error['message']}"
        assert answer["type"] == "error"
        assert answer["request_id"] == headers["request-id"] != ""
        return error["message"]

    check_page(page, refused)
