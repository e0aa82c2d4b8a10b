"""The server as a process: it starts, answers, reloads, and stops without dropping anybody."""

import asyncio
import signal
import socket
import threading
import time

import pytest

from tests.serve.asking import form, picture
from tests.serve.processes import PATIENCE, get, serving
from tests.serve.test_app import replace_run
from tests.small import missing


def post(address, seed=0, **more):
    request = form((f"{seed}.png", picture(seed)))
    return get(address, "/predict", request["body"], **{"Content-Type": request["headers"]["content-type"]}, **more)


@pytest.mark.slow
def test_it_answers_reloads_and_ends_when_it_is_told(run, made):
    with serving(run, "--watch", 0) as (process, address):
        assert address.startswith("http://127.0.0.1:")
        assert get(address) == (200, {"status": "ok", "key": False})
        status, told = post(address)
        assert (status, len(told["answers"])) == (200, 1)
        replace_run(made, run)
        process.send_signal(signal.SIGHUP)
        until = time.monotonic() + PATIENCE
        while 'outcome="loaded"} 1' not in get(address, "/metrics")[1]:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert post(address)[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_whoever_has_asked_before_the_end_is_answered(run):
    found = []
    with serving(run, "--wait-ms", 200) as (process, address):
        post(address)
        asking = [threading.Thread(target=lambda seed=seed: found.append(post(address, seed)[0])) for seed in range(6)]
        for thread in asking:
            thread.start()
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        for thread in asking:
            thread.join(PATIENCE)
        assert process.wait(PATIENCE) == 0
    assert found == [200] * 6


@pytest.mark.slow
def test_the_key_of_the_environment_is_asked_for(run):
    with serving(run, FEDPROTIP_API_KEY="open sesame\n") as (_, address):
        assert get(address) == (200, {"status": "ok", "key": True})
        asked = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Key": "AA==",
            "Sec-WebSocket-Version": "13",
        }
        assert get(address, "/metrics", **asked)[0] == 401
        assert post(address)[0] == 401
        assert post(address, Authorization="Bearer open sesame")[0] == 200


@pytest.mark.slow
def test_a_large_body_hears_why_over_a_real_connection(run):
    with serving(run, "--body-mb", 1) as (_, address):
        status, told = get(address, "/predict", bytes(5 * 10**6), **{"Content-Type": "application/json"})
        assert (status, "1,000,000 bytes" in told["error"]) == (413, True)
        assert post(address)[0] == 200


@pytest.mark.slow
def test_eight_clients_a_thousand_requests_no_error_and_memory_stays(run, capsys):
    """On loopback; `python -m benchmarks serve` measures, this only counts."""
    from benchmarks.serve import load, resident_mb

    with serving(run) as (process, address):
        load(address, [picture(seed, (32, 32)) for seed in range(16)], requests=200, clients=8)
        before = resident_mb(process.pid)
        found = load(address, [picture(seed, (32, 32)) for seed in range(16)], requests=1000, clients=8)
        after = resident_mb(process.pid)
    told = f"{found.rate:.0f} a second, p99 {1000 * found.p99:.0f} ms, memory {after - before:+.1f} MiB"
    with capsys.disabled():
        print(f"\n1,000 requests: {told}")
    assert found.errors == 0
    assert found.answered == 1000
    assert after - before < 30


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere"),
        (["RUN", "--host", "no such host.invalid"], "no address"),
        (["RUN", "--body-mb", "nan"], "--body-mb nan must be a number"),
        (["RUN", "--timeout", "inf"], "--timeout inf must be a number"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(call, run, arguments, said):
    code, _, errors = call("serve", *(run if name == "RUN" else name for name in arguments))
    assert code in (1, 2)
    assert said in errors
    assert errors.count("fedprotip:") == 1


@pytest.mark.parametrize("key", [" \t", "schlüssel", "one\ntwo", "\udcff"])
def test_a_key_that_no_request_can_bring_is_refused(call, run, monkeypatch, key):
    monkeypatch.setenv("FEDPROTIP_API_KEY", key)
    code, _, errors = call("serve", run)
    assert code == 2
    assert "FEDPROTIP_API_KEY must be letters, digits and signs of ASCII" in errors


def test_a_port_that_is_taken_is_a_sentence(call, run):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, errors = call("serve", run, "--port", taken.getsockname()[1])
    assert code == 1
    assert "choose another with --port" in errors


def test_without_the_extra_it_says_what_to_install(call, run, monkeypatch):
    missing(monkeypatch, "fedprotip.serve.server", "uvicorn")
    code, _, errors = call("serve", run)
    assert code == 2
    assert "fedprotip[serve]" in errors


@pytest.mark.slow
def test_answers_are_sent_at_once():
    """Else a reply's second part waits 40 ms until the asker's system says that it has the first."""
    from fedprotip.serve.server import _listen

    async def first_connection() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with _listen("127.0.0.1", 0) as listener:
            async with await asyncio.start_server(connected, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                writer.close()
                return await found

    assert asyncio.run(first_connection())
