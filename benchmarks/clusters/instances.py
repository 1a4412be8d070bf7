"""Prints all instances of the cloud as one line of JSON; runs where its address and keys are in the environment."""

import json

import boto3

rows = []
for instance in boto3.resource("ec2").instances.all():
    tags = {tag["Key"]: tag["Value"] for tag in instance.tags or []}
    rows.append(
        {
            "type": instance.instance_type,
            "state": instance.state["Name"],
            "pool": tags.get("ray-user-node-type", "?"),
            "address": instance.private_ip_address or "-",
        }
    )
print(json.dumps(rows))
