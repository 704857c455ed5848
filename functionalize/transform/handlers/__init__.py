"""Ops that need more than their functional variant."""
