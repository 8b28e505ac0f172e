"""A newcomer's first hour, walked through: `make test-first-hour`.

From an empty HOME to the first answer, a second model, wrong configurations, three teams, an upgrade under load, and
the end: with what a user has, which is the commands, HTTP and the OpenAI SDK. It runs the built-in model.
"""
