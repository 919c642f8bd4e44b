"""The lab: one page that shows queues, blocks, steps and reasons as they are, over the gateway's admin HTTP listener."""
