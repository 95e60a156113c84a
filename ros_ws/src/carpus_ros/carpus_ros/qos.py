"""Quality of service: profiles, overrides by parameter, and events across the ROS 2 distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rclpy.node import Node
from rclpy.qos import (
    DurabilityPolicy,
    HistoryPolicy,
    QoSPolicyKind,
    QoSProfile,
    ReliabilityPolicy,
    qos_policy_name_from_kind,
)
from rclpy.qos_overriding_options import QoSOverridingOptions

try:
    from rclpy.event_handler import (
        PublisherEventCallbacks,
        SubscriptionEventCallbacks,
        UnsupportedEventTypeError,
    )
except ImportError:  # Humble
    from rclpy.qos_event import PublisherEventCallbacks, SubscriptionEventCallbacks
    from rclpy.qos_event import UnsupportedEventTypeError  # type: ignore[no-redef]

__all__ = ["LATCHED", "RELIABLE", "SENSOR", "incompatible_message", "overridable", "publisher_events", "subscribe"]

SENSOR = QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)
"""Subscriptions to sensors: takes what reliable and best-effort publishers send."""

RELIABLE = QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=5, reliability=ReliabilityPolicy.RELIABLE)
"""Results and images: reaches reliable and best-effort subscribers."""

LATCHED = QoSProfile(
    history=HistoryPolicy.KEEP_LAST,
    depth=1,
    reliability=ReliabilityPolicy.RELIABLE,
    durability=DurabilityPolicy.TRANSIENT_LOCAL,
)
"""Facts that late subscribers need too."""


def overridable() -> QoSOverridingOptions:
    """Lets parameters ``qos_overrides.<topic>.<publisher|subscription>.<policy>`` change the profile."""
    return QoSOverridingOptions(
        policy_kinds=(
            QoSPolicyKind.HISTORY,
            QoSPolicyKind.DEPTH,
            QoSPolicyKind.RELIABILITY,
            QoSPolicyKind.DURABILITY,
        )
    )


def incompatible_message(topic: str, info: Any, other: str) -> str:
    """What an incompatible-QoS event says to a person.

    Args:
        topic: resolved name.
        info: the event.
        other: "publisher" or "subscription", whichever is at the other end.
    """
    try:
        policy = qos_policy_name_from_kind(info.last_policy_kind)
    except ValueError:
        policy = str(info.last_policy_kind)
    side = "subscription" if other == "publisher" else "publisher"
    return (
        f"a {other} of {topic} has incompatible QoS ({policy}): nothing flows between the two; "
        f"set qos_overrides.{topic}.{side}.{policy.lower()} here, or change the {other}"
    )


def publisher_events(on_incompatible: Callable[[Any], None]) -> PublisherEventCallbacks:
    """Event callbacks for a publisher."""
    return PublisherEventCallbacks(incompatible_qos=on_incompatible)


def subscribe(
    node: Node,
    message_type: Any,
    topic: str,
    callback: Callable[[Any], None],
    profile: QoSProfile,
    *,
    on_incompatible: Callable[[Any], None],
    on_lost: Callable[[Any], None] | None = None,
) -> Any:
    """Subscribe with overrides and with the events that the middleware supports."""
    attempts: list[dict[str, Any]] = [
        {"incompatible_qos": on_incompatible, "message_lost": on_lost},
        {"incompatible_qos": on_incompatible},
        {},
    ]
    for events in attempts:
        try:
            return node.create_subscription(
                message_type,
                topic,
                callback,
                profile,
                event_callbacks=SubscriptionEventCallbacks(**events, use_default_callbacks=False),
                qos_overriding_options=overridable(),
            )
        except UnsupportedEventTypeError:
            continue
    raise RuntimeError(f"the middleware refused a subscription to {topic} even without events")
