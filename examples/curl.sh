#!/usr/bin/env bash
# A gradient by curl alone: no Python, no torch, no gradbox on this machine.
#
#     gradbox up --models examples/models.toml &
#     GRADBOX_URL=http://127.0.0.1:8642 GRADBOX_TOKEN=… examples/curl.sh [FILE]
#
# Two images of 64 pixels, one black and one white, with the labels 3 and 7: the gradient of the mean
# cross-entropy goes to FILE (gradient.safetensors). That of the last bias is softmax − one-hot, so
# its ten numbers add up to 0, which the last lines print.
set -euo pipefail

url=${GRADBOX_URL:?the address of the box} token=${GRADBOX_TOKEN:?a token of it}
file=${1:-gradient.safetensors}
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
box() { curl --silent --show-error --fail-with-body -H "Authorization: Bearer $token" "$@"; }

# 1. A safetensors file: the length of the header in 8 bytes, the header, the numbers.
header='{"x/0":{"dtype":"F64","shape":[2,64],"data_offsets":[0,1024]},'
header+='"labels":{"dtype":"I64","shape":[2],"data_offsets":[1024,1040]}}'
while ((${#header} % 8)); do header+=' '; done
{
    printf "\\x$(printf %02x ${#header})\0\0\0\0\0\0\0%s" "$header"
    for _ in {1..64}; do printf '\0\0\0\0\0\0\0\0'; done        # 0.0
    for _ in {1..64}; do printf '\0\0\0\0\0\0\xf0\x3f'; done  # 1.0
    printf '\x03\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0'
} > "$work/inputs.safetensors"

# 2. Upload it under its digest.
blob=$(sha256sum "$work/inputs.safetensors" | cut -d ' ' -f 1)
box -X PUT --data-binary "@$work/inputs.safetensors" "$url/v1/blobs/$blob" > /dev/null

# 3. Post the job.
id=$(box -H 'Content-Type: application/json' -H "Idempotency-Key: $blob" "$url/v1/jobs" -d '{
    "computation": "gradient",
    "model": "digits",
    "inputs": [{"shards": [{"blob": "'"$blob"'", "prefix": "x/"}]}],
    "wrt": ["2"],
    "loss": {"kind": "builtin", "name": "cross_entropy"},
    "loss_inputs": {"labels": {"blob": "'"$blob"'", "tensor": "labels"}}
}' | tr -d '\n' | sed -E 's/.*"id": ?"([^"]*)".*/\1/')
echo "job $id"

# 4. Its events end when it does.
box --no-buffer "$url/v1/jobs/$id/events" > "$work/events"

# 5. Fetch the result, and read the ten numbers of the last bias out of it.
box "$url/v1/jobs/$id/result" -o "$file"
length=$(od -An -t u8 -N 8 "$file" | tr -d ' ')
offsets=$(head -c $((8 + length)) "$file" | tail -c "$length" |
    sed -E 's/.*"grads\/2\.bias":\{[^}]*"data_offsets":\[([0-9]+),([0-9]+)\].*/\1/')
echo "the gradient of the last bias, and its sum:"
od -An -t f8 -w8 -v -j $((8 + length + offsets)) -N 80 "$file" |
    awk '{ print $1; sum += $1 } END { printf "sum %.1e\n", sum; exit (sum^2 > 1e-24) }'
