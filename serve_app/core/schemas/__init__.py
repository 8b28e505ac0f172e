"""JSON schemas that an answer must satisfy: which of them a grammar can enforce.

Decides: whether a grammar enforces all that a schema says; if not, by which keyword and path it is refused.
In: a schema as the client sent it. Out: one that says the same or less, in a form that the grammar enforces.
Never: compiles a grammar, or accepts a keyword that the grammar would ignore.
"""

from serve_app.core.schemas.budget import SchemaBudget, TooManyParts, small_budget
from serve_app.core.schemas.places import with_enforced_schemas

__all__ = ["SchemaBudget", "TooManyParts", "small_budget", "with_enforced_schemas"]
