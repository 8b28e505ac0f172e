"""Every name in a span: of OpenTelemetry's conventions as of `VERSION`, and our own below `serve_app.`.

The conventions for generative AI are in development: a new version may rename what is not stable.
"""

from __future__ import annotations

VERSION = "1.41.0"
SCHEMA_URL = f"https://opentelemetry.io/schemas/{VERSION}"
SCOPE = "serve_app"  # the name of the instrumentation scope

# Of the resource.
SERVICE_NAME = "service.name"
SERVICE_VERSION = "service.version"
SERVICE_INSTANCE_ID = "service.instance.id"

# Stable.
ERROR_TYPE = "error.type"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
HTTP_STATUS = "http.response.status_code"

# Of generative AI.
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
MODEL = "gen_ai.request.model"
STREAM = "gen_ai.request.stream"
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"  # seconds, of a stream
INPUT_TOKENS = "gen_ai.usage.input_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"

# Ours, of a request's own span.
REQUEST_ID = "serve_app.request.id"
CLIENT_REQUEST_ID = "serve_app.request.client_id"
TENANT = "serve_app.tenant"
CLASS = "serve_app.class"
OUTCOME = "serve_app.outcome"
IS_ROW = "serve_app.batch_row"
BATCH_ID = "serve_app.batch.id"
ROW_NUMBER = "serve_app.batch.row"
FIRST_TOKEN_S = "serve_app.first_token_s"
KV_TOKEN_S = "serve_app.kv_token_s"
SLO = "serve_app.slo"
RETRY_AFTER_S = "serve_app.retry_after_s"
DROPPED_SPANS = "serve_app.dropped_spans"

# Ours, of the spans below it.
NUMBER = "serve_app.prompt.number"
AHEAD = "serve_app.queue.ahead"
REASON = "serve_app.wait.reason"
WAIT_S = "serve_app.wait.seconds"
REPLICA = "serve_app.replica.id"
ROUTE = "serve_app.route"
RUN_END = "serve_app.run.end"
GAP_S = "serve_app.gap_s"

# Names of spans and events.
LIMITS_SPAN = "limits"
PROMPT_SPAN = "prompt"
QUEUE_SPAN = "queue"
RUN_SPAN = "run"
RELAY_SPAN = "relay"
WAITED = "serve_app.waited"
FIRST_TOKEN = "serve_app.first_token"
PREEMPTED = "serve_app.preempted"
MOVED = "serve_app.moved"
LOST = "serve_app.lost"
CONTINUED = "serve_app.continued"
RESTARTED = "serve_app.restarted"
