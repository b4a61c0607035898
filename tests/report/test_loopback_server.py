"""The server of `fullshard report --serve`: known paths on loopback, nothing else, for nobody else."""

import contextlib
import http.client
import select
import socket
import threading

import pytest

from fullshard.config.errors import ConfigError
from fullshard.report import serve
from fullshard.report.serve import Content, LoopbackServer


@pytest.fixture(scope="module")
def server():
    paths = {"/": lambda: Content("text/html", "<p>page"), "/update": lambda: Content("application/json", '{"a": "é"}')}
    with LoopbackServer(paths, 0) as running:
        yield running


def get(server, path="/", method="GET", token=True, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    mark = "&" if "?" in path else "?"
    connection.putrequest(method, f"{path}{mark}token={server._server.token}" if token else path, skip_host=True)
    for name, value in {"Host": f"127.0.0.1:{server.port}", **headers}.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    try:
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def test_known_paths_are_served_with_safe_headers(server):
    status, text, headers = get(server)
    assert (status, text, headers["Content-Type"]) == (200, "<p>page", "text/html; charset=utf-8")
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert headers["X-Content-Type-Options"] == "nosniff" and "Access-Control-Allow-Origin" not in headers
    assert get(server, "/update?since=3")[1] == '{"a": "é"}'


def test_an_answer_that_the_page_has_already_is_not_sent_again(server):
    _, _, headers = get(server)
    assert get(server, **{"If-None-Match": headers["ETag"]})[:2] == (304, "")
    assert get(server, "/update", **{"If-None-Match": headers["ETag"]})[0] == 200


@pytest.mark.parametrize(
    "path", ["/metrics.jsonl", "/../etc/passwd", "/%2e%2e/etc/passwd", "/update/", "http://example.org/"]
)
def test_other_paths_are_not_found(server, path):
    assert get(server, path)[0] in (400, 404)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "CONNECT"])
def test_only_get_is_answered(server, method):
    status, _, headers = get(server, method=method)
    assert status == 501 and "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", None, "0.0.0.0"])
def test_a_foreign_host_name_is_refused(server, host):
    assert get(server, Host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9000", "127.0.0.1"])  # 9000: the near end of a tunnel
def test_names_of_this_machine_are_accepted(server, host):
    assert get(server, Host=host)[0] == 200


@pytest.mark.parametrize(
    "query", ["", "?token=", "?token=x", "?token=%ff", "?other=1", "?token[=", "?" + "token=1&" * 2000]
)
def test_who_does_not_know_the_token_reads_nothing(server, query):
    """Other users of the machine can reach the port."""
    status, text, _ = get(server, f"/{query}", token=False)
    assert status == 403 and "page" not in text.replace("report", "") and "has printed" in text
    assert get(server, f"/update{query}", token=False)[0] == 403


def test_each_server_has_a_token_of_its_own(server):
    with LoopbackServer({"/": lambda: Content("text/html", "other")}, 0) as other:
        tokens = {one._server.token for one in (server, other)}
        assert len(tokens) == 2 and min(map(len, tokens)) >= 32
        assert get(server, f"/?token={other._server.token}", token=False)[0] == 403


def test_it_listens_on_loopback_only(server):
    assert server.url == f"http://127.0.0.1:{server.port}/?token={server._server.token}"
    assert server._server.socket.getsockname()[0] == "127.0.0.1"


def test_ports_that_cannot_be_used(server):
    with pytest.raises(ConfigError, match=f"--port {server.port} is in use"):
        LoopbackServer({}, server.port)
    with pytest.raises(ConfigError, match="--port 70000 cannot be used"):
        LoopbackServer({}, 70000)


def idle_connections(server, count, stack):
    return [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(count)]


def test_connections_and_their_time_are_limited(monkeypatch):
    assert serve.SECONDS < 60
    monkeypatch.setattr(serve, "SECONDS", 0.4)
    with LoopbackServer({"/": lambda: Content("text/html", "page")}, 0) as server, contextlib.ExitStack() as open_ones:
        before = threading.active_count()
        count = serve.MOST_REQUESTS + 10
        idle = idle_connections(server, count, open_ones)
        closed = closed_ones(idle, 10)
        assert threading.active_count() - before <= serve.MOST_REQUESTS
        closed |= closed_ones(idle, count)  # those that say nothing are given up
        assert closed == set(idle)
        assert get(server)[0] == 200


def test_a_request_that_comes_byte_by_byte_has_a_deadline(monkeypatch):
    monkeypatch.setattr(serve, "SECONDS", 0.4)
    with LoopbackServer({}, 0) as server, socket.create_connection(("127.0.0.1", server.port)) as slow:
        for _ in range(100):  # a byte every 0.1 seconds, for 25 times as long as a request may take
            if select.select([slow], [], [], 0.1)[0]:
                break
            slow.send(b"G")
        else:
            pytest.fail("the server waits for the rest as long as bytes come")
        with contextlib.suppress(ConnectionError):
            assert slow.recv(1) == b""


def test_slow_connections_do_not_keep_others_out():
    """Each sends a byte now and then; who sends a whole request is answered at once."""
    with LoopbackServer({"/": lambda: Content("text/html", "page")}, 0) as server, contextlib.ExitStack() as open_ones:
        for _ in range(3):
            for one in idle_connections(server, serve.MOST_REQUESTS, open_ones):
                one.send(b"GET /")
            assert get(server)[:2] == (200, "page")


def test_an_answer_on_its_way_is_not_given_up_for_others():
    begun, finish = threading.Event(), threading.Event()

    def page():
        begun.set()
        assert finish.wait(10)
        return Content("text/html", "page")

    with LoopbackServer({"/": page}, 0) as server, contextlib.ExitStack() as open_ones:
        found = []
        asking = threading.Thread(target=lambda: found.append(get(server)[:2]))
        asking.start()
        assert begun.wait(10)
        idle = idle_connections(server, 2 * serve.MOST_REQUESTS, open_ones)
        closed_ones(idle, serve.MOST_REQUESTS)
        finish.set()
        asking.join(10)
        assert found == [(200, "page")]


def closed_ones(connections, number):
    """The first so many connections that the server closes."""
    closed = set()
    while len(closed) < number:
        ready = select.select([one for one in connections if one not in closed], [], [], 10)[0]
        assert ready, f"{len(closed)} of {number} connections are closed"
        closed |= set(ready)
    return closed


def test_a_page_that_fails_is_seen(server, capsys):
    server._server.paths["/bad"] = lambda: 1 / 0
    with pytest.raises(http.client.HTTPException):
        get(server, "/bad")
    assert get(server)[0] == 200
    assert "ZeroDivisionError" in capsys.readouterr().err
