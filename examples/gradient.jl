#!/usr/bin/env julia
# A gradient from Julia, with the packages HTTP and JSON: docs/wire.md has the formats.
#
# Put the box's address and a token of it in the second line. The box serves the tutorial's `digits`.
# Julia keeps columns together and the box rows: a shape is reversed, and no number moves.
using HTTP, JSON, SHA

url, token = "http://127.0.0.1:8642", "gbx_…"
headers = ["Authorization" => "Bearer $token"]

function safetensors(tensors)
    header, numbers = Dict{String,Any}(), IOBuffer()
    for (name, dtype, array) in tensors
        start = position(numbers)
        write(numbers, array)
        offsets = [start, position(numbers)]
        header[name] = Dict("dtype" => dtype, "shape" => collect(reverse(size(array))), "data_offsets" => offsets)
    end
    text = Vector{UInt8}(JSON.json(header))
    length_bytes = collect(reinterpret(UInt8, [htol(UInt64(length(text)))]))
    return vcat(length_bytes, text, take!(numbers))
end

images = rand(Float64, 64, 8)  # 8 samples of 64 numbers
labels = collect(Int64, 0:7)
inputs = safetensors([("0/0", "F64", images), ("labels", "I64", labels)])
blob = bytes2hex(sha256(inputs))
HTTP.put("$url/v1/blobs/$blob", headers, inputs)

spec = Dict(
    "protocol" => 1, "computation" => "gradient", "model" => "digits",
    "inputs" => [Dict("shards" => [Dict("blob" => blob, "prefix" => "0/")])],
    "loss" => Dict("kind" => "builtin", "name" => "cross_entropy"),
    "loss_inputs" => Dict("labels" => Dict("blob" => blob, "tensor" => "labels")),
)
function result_of(spec)
    posted = HTTP.post("$url/v1/jobs", [headers; "Content-Type" => "application/json"], JSON.json(spec))
    job = JSON.parse(String(posted.body))
    id = job["id"]
    while job["state"] in ("queued", "running")
        job = JSON.parse(String(HTTP.get("$url/v1/jobs/$id", [headers; "Prefer" => "wait=30"]).body))
    end
    job["state"] == "done" || error(job["state"])
    return HTTP.get("$url/v1/jobs/$id/result", headers).body
end
file = result_of(spec)

begins = 8 + Int(ltoh(only(reinterpret(UInt64, file[1:8]))))
header = JSON.parse(String(file[9:begins]))
receipt = JSON.parse(header["__metadata__"]["gradbox"])
entry = header["grads/0.weight"]
from, to = entry["data_offsets"]
gradient = reshape(reinterpret(Float64, file[(begins + from + 1):(begins + to)]), reverse(entry["shape"])...)
println(receipt["loss"], " ", size(gradient))
