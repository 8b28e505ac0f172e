"""The console at `/console`: its files, the login by a cookie, and the stream of what happens now.

Decides: which requests the cookie identifies, who may watch, and how much a console gets.
In: requests below `/console`, cookies, answers of the cluster. Out: files, cookies, events.
Never: keeps a key, or lets a browser act that was not on the console's own page.
"""

from serve_app.http.console.calls import OPEN_CALLS, ConsoleCall, is_of_console
from serve_app.http.console.console import Console
from serve_app.http.console.live_sources import live_sources
from serve_app.http.console.live_watch import LiveSources

__all__ = ["OPEN_CALLS", "Console", "ConsoleCall", "LiveSources", "is_of_console", "live_sources"]
