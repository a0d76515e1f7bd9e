"""Looks at a report and at the site in headless Chromium: at a phone's and a desktop's
width, by day and by night.

make browser
python benchmarks/browser.py --out=build/browser --site=build/site RUN [RUN ...]

Of the site's PAGES it checks that nothing is loaded from elsewhere and nothing fails,
that a page is no wider than the screen, and that its colours follow the system's theme.
Of a report it checks that nothing is loaded from a network and nothing fails, that
curves are drawn in each run's colour, that pointing at one says its loss, that dragging
zooms and the toolbar's reset goes back, that a box hides a run, that the page is no
wider than the screen, and that colours follow the system's theme, also while the page
is open. OUT
then has pictures of what it saw. It needs chromium and chromedriver
(apt-get install chromium chromium-driver) and pip install -e '.[browser]'.
"""

import argparse
import base64
import contextlib
import functools
import http.server
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.by import By

SCREENS = {"phone": (390, 844, True), "desktop": (1280, 900, False)}
PAPER = {"light": (255, 255, 255), "dark": (21, 24, 29)}
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
         "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip
PAGES = ("", "methods/", "api/methods/", "results/overlap/", "results/peers/")
SECONDS = 20  # until something must be there

# The pictures' canvases are in shadow trees; views know where data are on the screen.
LIBRARY = """
window.roots = () => Bokeh.documents.flatMap((d) => d.roots());
window.shown = (n) => [...Bokeh.index.roots].find((v) => v.model === roots()[n]);
window.point = (n, r, i) => {  // where point i of renderer r of figure n is
  const view = shown(n), data = roots()[n].renderers[r];
  const name = data.glyph.x.field, source = data.data_source.data;
  const frame = view.frame, box = view.canvas_view.el.getBoundingClientRect();
  return [box.x + frame.x_scale.compute(source[name][i]),
          box.y + frame.y_scale.compute(source.loss[i])];
};
window.canvases = (n) =>
  [...shown(n).canvas_view.el.shadowRoot.querySelectorAll("canvas")];
window.colour = (r) => r.glyph.line_color.value;
window.ends = () => {
  const [first, second] = roots();
  return [first.x_range.start, first.x_range.end, first.y_range.start,
          second.y_range.start];
};
window.frame = () => {  // of the first figure: left, top, width, height
  const box = shown(0).canvas_view.el.getBoundingClientRect();
  const inner = shown(0).frame.bbox;
  return [box.x + inner.left, box.y + inner.top, inner.width, inner.height];
};
window.pixels = (n, colour) => {  // how many of a figure's pixels have a colour
  const wanted = colour.match(/[0-9a-f]{2}/gi).map((x) => parseInt(x, 16));
  let found = 0;
  for (const canvas of canvases(n)) {
    const {width, height} = canvas;
    if (!width || !height) continue;
    const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
    for (let i = 0; i < data.length; i += 4) {
      const near = wanted.every((w, k) => Math.abs(w - data[i + k]) < 12);
      if (near && data[i + 3] > 200) found += 1;
    }
  }
  return found;
};
window.tooltips = () => {  // the text of what is shown, through all shadow trees
  const found = [];
  const visit = (node) => {
    for (const e of node.querySelectorAll("*")) {
      const box = e.getBoundingClientRect();
      if (e.classList.contains("bk-Tooltip") && box.width) {
        found.push(e.shadowRoot.textContent);
      }
      if (e.shadowRoot) visit(e.shadowRoot);
    }
  };
  visit(document);
  return found.join(" ");
};
"""


@contextlib.contextmanager
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or sys.exit("no chromium here")
    options.set_capability(
        "goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"}
    )
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        driver = webdriver.Chrome(options, service)
        try:
            yield driver
        finally:
            driver.quit()


def eventually(what, condition):
    end = time.monotonic() + SECONDS
    while not (value := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.1)
    return value


def show(driver, theme):
    features = [{"name": "prefers-color-scheme", "value": theme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def emulate(driver, screen, theme):
    width, height, mobile = SCREENS[screen]
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    touch = {"enabled": mobile, "maxTouchPoints": 1}
    driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", touch)
    show(driver, theme)
    driver.get("about:blank")
    driver.get_log("performance")  # of the browser's own first page


def load(driver, page, screen, theme):
    emulate(driver, screen, theme)
    driver.get(page.resolve().as_uri())
    driver.execute_script(LIBRARY)
    js = driver.execute_script
    eventually(
        "the figures are not drawn",
        lambda: js(
            "return roots().length && roots().every((_, n) => shown(n)?.is_idle)"
        ),
    )
    eventually(
        "no curve",
        lambda: js("return pixels(0, colour(roots()[0].renderers[1]))"),
    )


def check_quiet(driver, place):
    """Nothing but what is at this place was asked for, and nothing failed."""
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            url = message["params"]["request"]["url"]
            local = url.startswith(("data:", "blob:", "chrome:"))
            assert local or url.startswith(place), url
    # "rendering": what counting pixels itself gives rise to
    found = [e for e in driver.get_log("browser") if e["source"] != "rendering"]
    errors = [e for e in found if e["level"] in ("SEVERE", "WARNING")]
    assert not errors, errors


def check_fit(driver):
    js = driver.execute_script
    wide, screen = js("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide <= screen, f"the page is {wide} wide, the screen {screen}"
    return screen


def check_width(driver):
    js = driver.execute_script
    screen = check_fit(driver)
    boxes = js(
        "return roots().map((_, n) => shown(n).el.getBoundingClientRect().width)"
    )
    assert all(200 < box <= screen for box in boxes), boxes


def check_curves(driver):
    """Every run is drawn in its colour, in every figure of the loss."""
    js = driver.execute_script
    figures = js("return roots().map(f => f.renderers.filter(r => r.name).map(colour))")
    for number, colours in enumerate(figures):
        for colour in set(colours):
            assert js("return pixels(...arguments)", number, colour) > 10, (
                number,
                colour,
            )


def check_theme(driver, theme):
    js = driver.execute_script
    paper = f"rgb({', '.join(map(str, PAPER[theme]))})"
    colour = "return getComputedStyle(document.documentElement).backgroundColor"
    eventually(f"the page is not {theme}", lambda: js(colour) == paper)
    wanted = "".join(f"{c:02x}" for c in PAPER[theme])
    for number in range(js("return roots().length")):
        eventually(
            f"figure {number} is not {theme}",
            lambda n=number: js("return pixels(...arguments)", n, wanted) > 20_000,
        )


def check_hover(driver):
    """Pointing at a held-out loss says the run, the loss and where it is."""
    js = driver.execute_script
    js("document.querySelector('#curves').scrollIntoView()")
    number, last, loss = js("""
      const n = roots()[0].renderers.findIndex((r) => /held out$/.test(r.name || ""));
      const loss = roots()[0].renderers[n].data_source.data.loss;
      return [n, loss.length - 1, loss[loss.length - 1]];
    """)

    def says():  # the first move only enters the canvas
        x, y = map(round, js("return point(0, ...arguments)", number, last))
        actions = ActionBuilder(driver)
        for step in (3, 2, 1, 0):
            actions.pointer_action.move_to_location(x - step, y)
        actions.perform()
        return js("return tooltips()")

    text = eventually("no tooltip", says)
    assert f"{loss:.4f}" in text and "half-round" in text, text


def check_zoom(driver):
    """Dragging narrows the axes, in all figures along y; reset goes back."""
    js = driver.execute_script
    js("document.querySelector('#curves').scrollIntoView()")
    now_at = "return ends()"
    before = js(now_at)
    box = js("return frame()")
    actions = ActionBuilder(driver)
    pointer = actions.pointer_action
    pointer.move_to_location(round(box[0] + 0.3 * box[2]), round(box[1] + 0.3 * box[3]))
    pointer.pointer_down()
    pointer.move_to_location(round(box[0] + 0.5 * box[2]), round(box[1] + 0.5 * box[3]))
    pointer.move_to_location(round(box[0] + 0.7 * box[2]), round(box[1] + 0.7 * box[3]))
    pointer.pointer_up()
    actions.perform()
    after = eventually("no zoom", lambda: (now := js(now_at)) != before and now)
    assert before[0] < after[0] < after[1] < before[1], (before, after)
    assert after[2] == after[3] > before[2]
    js("shown(0).reset()")
    eventually("no reset", lambda: js(now_at) == before)


def check_boxes(driver):
    """A box takes a run's curves away, and brings them back."""
    js = driver.execute_script
    box = driver.find_element(By.CSS_SELECTOR, "#shown input")
    first = "roots()[0].renderers.find(r => r.tags[0] === arguments[0])"
    colour = js(f"return colour({first})", box.get_attribute("value"))
    box.click()
    eventually(
        "a hidden run is drawn",
        lambda: not js("return pixels(0, arguments[0])", colour),
    )
    box.click()
    eventually(
        "a run stays hidden", lambda: js("return pixels(0, arguments[0])", colour)
    )


def photograph(driver, screen, picture):
    """Takes a picture of the whole page."""
    height = driver.execute_script("return document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": SCREENS[screen][0], "height": height, "scale": 1}
    shot = driver.execute_cdp_cmd(
        "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip}
    )
    picture.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def served(site):
    """Serves the site on this machine, one version as mike lays it out; its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "0.1").symlink_to(Path(site).resolve())
        versions = [{"version": "0.1", "title": "0.1", "aliases": ["latest"]}]
        Path(folder, "versions.json").write_text(json.dumps(versions))
        handler = functools.partial(Quiet, directory=folder)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}/"
            server.shutdown()


def look_at_site(driver, place, out):
    """Looks at the site's pages on every screen, in both themes."""
    js = driver.execute_script
    light = "return parseInt(getComputedStyle(document.body).backgroundColor.slice(4))"
    for page in PAGES:
        for screen in SCREENS:
            for theme in PAPER:
                emulate(driver, screen, theme)
                driver.get(f"{place}0.1/{page}")
                js("localStorage.clear()")  # the theme of the visit before
                driver.refresh()
                eventually(
                    "no heading", lambda: js("return document.querySelector('h1')")
                )
                eventually(
                    f"the page is not {theme}",
                    lambda theme=theme: (js(light) > 128) == (theme == "light"),
                )
                check_fit(driver)
                name = page.strip("/").replace("/", "-") or "home"
                photograph(driver, screen, out / f"site-{name}-{screen}-{theme}.png")
                check_quiet(driver, place)
                print(f"{page or 'home'}, {screen}, {theme}: right")


def look(driver, page, out):
    """Looks at a page on every screen, in both themes."""
    for screen in SCREENS:
        for theme in PAPER:
            load(driver, page, screen, theme)
            check_theme(driver, theme)
            check_width(driver)
            check_curves(driver)
            driver.execute_script("document.querySelector('#curves').scrollIntoView()")
            driver.save_screenshot(
                str(out / f"{page.stem}-{screen}-{theme}-curves.png")
            )
            photograph(driver, screen, out / f"{page.stem}-{screen}-{theme}.png")
            if screen == "desktop":
                check_hover(driver)
                driver.save_screenshot(
                    str(out / f"{page.stem}-{screen}-{theme}-hover.png")
                )
                check_zoom(driver)
                check_boxes(driver)
            show(driver, "dark" if theme == "light" else "light")
            check_theme(driver, "dark" if theme == "light" else "light")
            check_quiet(driver, page.resolve().as_uri())
            print(f"{page.name}, {screen}, {theme}: right")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", help="folders, as for acco_jax.report")
    parser.add_argument("--site", help="what `make docs` has built")
    parser.add_argument("--out", default="build/browser", help="folder for what it saw")
    arguments = parser.parse_args()
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    page = out / "report.html"
    if arguments.runs:
        command = [sys.executable, "-m", "acco_jax.report"]
        subprocess.run([*command, *arguments.runs, f"--out={page}"], check=True)
    with browser() as driver:
        if arguments.runs:
            look(driver, page, out)
        if arguments.site:
            with served(arguments.site) as place:
                look_at_site(driver, place, out)
    print(f"pictures are in {out}")


if __name__ == "__main__":
    main()
