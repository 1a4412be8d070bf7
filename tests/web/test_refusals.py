"""What is not served is refused in the sentence of a page, by the name of its parameter, as its protocol refuses."""

from __future__ import annotations

import json

from tests.support.golden import check_page, pages_beside
from tests.web.support import call

USER = [{"role": "user", "content": "hello"}]
BODIES = {
    "/v1/completions": {"prompt": "lazy"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/chat/completions/batch": {"messages": [USER]},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": USER, "max_tokens": 2000},
}
"""Path -> a request, of which the page names what is changed."""


def test_what_is_not_served_is_refused_in_the_sentence_of_the_page(scripted):
    _, at = scripted

    def refused(line):
        path, _, changes = line.partition(" ")
        status, headers, answer = call(f"{at}{path}", BODIES[path] | json.loads(changes))
        error = answer["error"]
        assert (status, error["type"]) == (400, "invalid_request_error"), line
        assert "YAML" not in error["message"]
        if path != "/v1/messages":
            return f"{error['param']} | {error['message']}"
        assert answer["type"] == "error"
        assert answer["request_id"] == headers["request-id"] != ""
        return error["message"]

    for page in pages_beside(__file__):
        check_page(page, refused)
