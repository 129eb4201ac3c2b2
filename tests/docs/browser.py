"""A headless Chromium, controlled by the DevTools protocol through a pipe: no driver and no web socket is needed."""

import base64
import fcntl
import json
import os
import shutil
import subprocess

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
KEYS = {" ": ("Space", 32), "ArrowLeft": ("ArrowLeft", 37), "ArrowUp": ("ArrowUp", 38),
        "ArrowRight": ("ArrowRight", 39),
        "ArrowDown": ("ArrowDown", 40), "End": ("End", 35), "Home": ("Home", 36), "r": ("KeyR", 82)}  # fmt: skip
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--hide-scrollbars",
)  # fmt: skip


class Browser:
    """One tab. `faults` collects exceptions and errors of the console, `requests` every requested address."""

    def __init__(self, profile):
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # Chromium reads descriptor 3 and writes 4: away with ours from there.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{high[0]} 4>&{high[1]}', PROGRAM, *FLAGS, "--remote-debugging-pipe",
             f"--user-data-dir={profile}", "about:blank"],
            pass_fds=high, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        self.input, self.output = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb", 0)
        self.buffer, self.last, self.session = b"", 0, None
        self.faults, self.requests, self.loaded = [], [], set()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def close(self):
        try:
            self.session = None
            self.call("Browser.close")
        except EOFError:
            pass
        self.process.wait(timeout=20)
        self.input.close()
        self.output.close()

    def _read(self):
        while b"\0" not in self.buffer:
            data = os.read(self.input.fileno(), 1 << 16)
            if not data:
                raise EOFError("Chromium has ended")
            self.buffer += data
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def _hear(self, message):
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Page.lifecycleEvent" and parameters["name"] == "load":
            self.loaded.add(parameters["loaderId"])
        elif method == "Runtime.exceptionThrown":
            self.faults.append(json.dumps(parameters["exceptionDetails"])[:400])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.faults.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def call(self, method, **parameters):
        self.last += 1
        message = {"id": self.last, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.output.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") != self.last:
                self._hear(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            else:
                return answer["result"]

    def open(self, address, width=1280, height=800, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        # Another address of the same page would only be a hash that changes.
        self.call("Page.navigate", url="about:blank")
        loader = self.call("Page.navigate", url=address)["loaderId"]
        while loader not in self.loaded:
            self._hear(self._read())

    def run(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"])[:400])
        return result["result"].get("value")

    def text(self, selector):
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent.trim()")

    def press(self, key, times=1):
        code, number = KEYS[key]
        for _ in range(times):
            for kind in ("keyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code=code, windowsVirtualKeyCode=number)

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
