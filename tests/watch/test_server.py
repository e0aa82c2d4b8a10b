"""The page of a run: on this machine alone, without outside assets, and with nothing read as HTML."""

import html
import http.client
import json
import re
import shutil
import subprocess
import sys
import threading
from importlib.resources import files
from urllib.request import urlopen

import pytest

from fedprotip.errors import UsageError
from fedprotip.watch import Watched, WatchServer
from tests.report.test_rundata import make_run
from tests.serve.browser import Browser


@pytest.fixture
def server(tmp_path):
    make_run(tmp_path / "r")
    with WatchServer(Watched(tmp_path / "r"), port=0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), content


def test_it_serves_a_few_names_and_nothing_else(server):
    kinds = {"/": "text/html", "/watch.js": "text/javascript", "/watch.css": "text/css", "/state.json": "application"}
    kinds |= {"/icon.svg": "image/svg+xml", "/favicon.ico": "image/svg+xml"}
    for path, kind in kinds.items():
        status, headers, content = ask(server, path)
        assert status == 200
        assert headers["Content-Type"].startswith(kind)
        assert int(headers["Content-Length"]) == len(content) > 0
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
    for path in ("/settings.toml", "/../manifest.json", "/%2e%2e/manifest.json", "/report.html", "/view.py"):
        assert ask(server, path)[0] == 404
    assert ask(server, "/state.json", "HEAD")[2] == b""
    assert ask(server, "/state.json", "POST")[0] == 501


def test_the_state_is_that_of_the_folder(server, tmp_path):
    state = json.loads(ask(server, "/state.json?1")[2])
    assert (state["status"], state["learned"], state["title"]) == ("finished", 3, "FedProTIP on digits")
    assert state == json.loads(json.dumps(Watched(tmp_path / "r").look().model_dump()))


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", ""])
def test_a_page_of_another_host_cannot_ask(server, host):
    assert ask(server, "/state.json", Host=host)[0] == 403
    assert ask(server, "/state.json", Host=f"localhost:{server.server_port}")[0] == 200


def test_it_listens_on_the_loopback_address_and_says_when_a_port_is_taken(server, tmp_path):
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(UsageError, match=rf"--port {server.server_port} is in use; choose another one"):
        WatchServer(Watched(tmp_path / "r"), server.server_port)


def test_the_page_has_no_outside_assets_and_reads_nothing_as_html():
    page, script, look = (
        (files("fedprotip") / "watch" / f"watch.{kind}").read_text() for kind in ("html", "js", "css")
    )
    for text in (page, look, script.replace("http://www.w3.org/2000/svg", "")):
        assert not re.search(r"https?:|//[a-z]|@import|url\(", text.replace("// ", ""))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script)
    assert not re.search(r"\son\w+=|style=|<script>|<style", page)


def test_the_verb(tmp_path, call):
    make_run(tmp_path / "r")
    code, out, _ = call("watch", tmp_path / "r", "--json")
    assert (code, json.loads(out)["status"]) == (0, "finished")
    code, out, _ = call("watch", tmp_path / "none", "--json")
    assert (code, json.loads(out)["status"]) == (0, "waiting")


TASKS = {"stream": {"tasks": 3}, "train": {"rounds": 1}}


class Growing(Watched):
    """A run that is there when one looks for the second time."""

    looks = 0

    def look(self):
        self.looks += 1
        return super().look() if self.looks > 1 else Watched(self._path / "none").look()


@pytest.mark.slow
def test_a_browser_shows_a_run_without_reloading_and_reads_nothing_as_html(tmp_path):
    """In headless Chromium, whose clock runs ahead: the page asks again by itself."""
    chromium = shutil.which("chromium")
    assert chromium, "this test needs the Debian package chromium"
    folder, nasty = (
        make_run(tmp_path / "r", failures=2, settings=TASKS),
        "<img src=x onerror=\"document.title='taken over'\">",
    )
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "warning", "text": nasty}) + "\n")
    watched = Growing(folder)
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += f" --disable-component-update --disable-sync --user-data-dir={tmp_path / 'browser'} --dump-dom"
    with WatchServer(watched, port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [chromium, *flags.split(), "--virtual-time-budget=5000", server.address]
        page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        server.shutdown()
    assert watched.looks >= 2
    assert '<span id="status" class="chip finished">finished</span>' in page
    assert "3 of 3" in page
    assert page.count("<polyline") == 1  # losses; this run tells no accuracy of its tasks
    assert "clients left out" in page
    assert f"<li>{html.escape(nasty, quote=False)}</li>" in page
    assert "<title>100 % · FedProTIP on digits</title>" in page


@pytest.mark.slow
def test_on_a_phone_everything_can_be_read(tmp_path):
    """The legend stays within its picture, the sum of a long table is seen, and the page has an icon."""
    folder = make_run(tmp_path / "r", settings=TASKS)
    accuracy = dict.fromkeys(("single", "aware", "agnostic", "batch64"), 90.0)
    done = {"event": "task", "task": 0, "accuracy": accuracy, "by_task": {mode: [90.0] for mode in accuracy}}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(done) + "\n")
    with (folder / "ledger.jsonl").open("w") as file:
        for kind in range(30):
            line = {"task": 0, "round": 0, "client": 0, "direction": "up", "kind": f"kind {kind}", "bytes": 1000}
            file.write(json.dumps(line | {"status": "ok", "reason": ""}) + "\n")
    with WatchServer(Watched(folder), port=0) as server, Browser() as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.size(390, 800, mobile=True)
        browser.open(server.address)
        browser.until("document.querySelectorAll('#bytes tbody tr').length")
        box = "getBoundingClientRect()"
        assert browser.evaluate("document.querySelectorAll('#accuracy svg rect').length") == 4
        assert browser.evaluate(f"""[...document.querySelectorAll("#accuracy svg text")].every(
            (one) => one.{box}.right <= one.closest("svg").{box}.right)""")
        assert browser.evaluate(f"""document.querySelector("#bytes tbody tr:last-child td").{box}.bottom
            <= document.querySelector("#bytes .scroll").{box}.bottom + 1""")
        assert browser.evaluate("document.querySelector('#bytes tbody tr:last-child td').textContent") == "30.0 kB"
        assert [name for name in browser.requested() if name.endswith("icon.svg")]
        assert browser.complaints() == []
        server.shutdown()


@pytest.mark.slow
def test_ctrl_c_ends_the_page_with_a_word(tmp_path):
    command = [sys.executable, "-m", "fedprotip", "watch", str(tmp_path / "r"), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert "There is no run in" in process.stderr.readline()
            (address,) = re.findall(r"http://[\d.:]+/", process.stderr.readline())
            assert urlopen(address, timeout=30).status == 200
            process.terminate()
            assert process.stderr.read() == "The page has ended.\n"
            assert process.wait(30) == 0
        finally:
            process.kill()
