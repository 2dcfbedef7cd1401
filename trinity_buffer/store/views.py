"""Views with speaking names, for people who ask in SQL; nothing in here reads them."""

from __future__ import annotations

_UID = "e.batch, e.task, e.run, e.step, e.suffix"
_OF_THE_ROW = "JOIN experience e ON e.experiment = a.experiment AND e.address = a.experience"
# An annotation's address names no set: asked for in each set, the primary key finds it.
_BY_ADDRESS = (
    "JOIN consumer s ON s.experiment = {row}.experiment AND s.kind = 'strategy' "
    "JOIN annotation a ON a.experiment = s.experiment AND a.consumer = s.name "
    "AND a.address = {row}.address"
)

VIEWS = {
    "rollouts": f"SELECT x.name AS experiment, {_UID}, e.reward, e.policy_version, "
    "e.prompt_length, e.length AS tokens, e.trained_tokens, e.finish_reason, e.refused, "
    "e.address >> 20 AS position FROM experience e JOIN experiment x ON x.id = e.experiment",
    "annotated_rollouts": f"SELECT x.name AS experiment, a.consumer AS annotation_set, {_UID}, "
    "e.reward, a.address >> 20 AS position FROM annotation a "
    f"JOIN experiment x ON x.id = a.experiment {_OF_THE_ROW}",
    "rejected_rollouts": f"SELECT x.name AS experiment, r.consumer AS rejected_by, r.reason, "
    f"{_UID}, e.reward, r.position FROM rejection r JOIN experiment x ON x.id = r.experiment "
    "JOIN consumer c ON c.experiment = r.experiment AND c.name = r.consumer "
    "AND c.kind = 'strategy' JOIN experience e ON e.experiment = r.experiment "
    "AND e.address = r.address UNION ALL "
    f"SELECT x.name, r.consumer, r.reason, {_UID}, e.reward, r.position FROM rejection r "
    "JOIN experiment x ON x.id = r.experiment "
    "JOIN consumer c ON c.experiment = r.experiment AND c.name = r.consumer "
    f"AND c.kind = 'trainer' {_BY_ADDRESS.format(row='r')} {_OF_THE_ROW}",
    "trained_rollouts": "SELECT x.name AS experiment, d.consumer AS trainer, "
    "d.step AS gradient_step, d.step <= c.committed_step AS committed, "
    f"a.consumer AS annotation_set, {_UID}, e.reward, e.policy_version "
    "FROM delivery d JOIN experiment x ON x.id = d.experiment "
    "JOIN consumer c ON c.experiment = d.experiment AND c.name = d.consumer "
    f"{_BY_ADDRESS.format(row='d')} {_OF_THE_ROW} WHERE d.source = ''",
    "gradient_steps": "SELECT x.name AS experiment, t.consumer AS trainer, t.step, "
    "h.recorded_at / 1000000.0 AS handed_out_at, k.recorded_at / 1000000.0 AS committed_at, "
    't."rows", t."groups", t.checkpoint, t.leased_at AS handed_out_position, '
    "t.committed_at AS committed_position FROM step t "
    "JOIN experiment x ON x.id = t.experiment "
    "JOIN event h ON h.experiment = t.experiment AND h.position = t.leased_at "
    "LEFT JOIN event k ON k.experiment = t.experiment AND k.position = t.committed_at",
}
"""Name -> what it shows; the same words on every backend. Times are seconds since 1970."""


def created(name: str) -> str:
    """Return the statement that creates a view."""
    return f"CREATE VIEW {name} AS {VIEWS[name]}"


def statements() -> list[str]:
    """Return the statements that create all of them."""
    return [created(name) for name in VIEWS]
