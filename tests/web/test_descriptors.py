"""A process without free file descriptors: who is connected is served, and others are once there are some again."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import socket
from urllib.parse import urlsplit

from tests.support.limits import limited
from tests.web.chats import Scripted
from tests.web.support import edge_over, served

PATIENCE_S = 300


def status_of(connection):
    connection.request("GET", "/version")
    answer = connection.getresponse()
    answer.read()
    return answer.status


def test_a_process_without_descriptors_serves_those_who_are_connected():
    with served(edge_over(Scripted())) as url:
        at = urlsplit(url)
        known = http.client.HTTPConnection(at.hostname, at.port, timeout=PATIENCE_S)
        assert status_of(known) == 200
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.socket()) for _ in range(20)]  # of this process, too
            with limited(resource.RLIMIT_NOFILE, len(os.listdir("/dev/fd")) + 5):
                for client in clients:
                    client.connect((at.hostname, at.port))
                for _ in range(20):
                    assert status_of(known) == 200
        late = http.client.HTTPConnection(at.hostname, at.port, timeout=PATIENCE_S)
        assert status_of(late) == status_of(known) == 200
        known.close()
        late.close()
