//! Patches, as far as anybody asks for them here: a merge of conditions, and operations on one path.

use serde_json::Value;

/// Applies a patch to a Node, of which it may change this part. An error is the code that a real API server answers.
pub(super) fn apply(
    node: &mut Value,
    part: &str,
    content_type: &str,
    body: &[u8],
) -> Result<(), u16> {
    let patch: Value = serde_json::from_slice(body).map_err(|_| 400_u16)?;
    let before = node.clone();
    match content_type {
        "application/strategic-merge-patch+json" => merge(node, &patch)?,
        "application/json-patch+json" => {
            for operation in patch.as_array().ok_or(400_u16)? {
                operate(node, operation)?;
            }
        }
        _ => return Err(415),
    }
    // The subresource has one part, all else the others.
    let mut other = node.clone();
    other[part] = before[part].clone();
    if other == before { Ok(()) } else { Err(400) }
}

/// Merges objects; of lists only conditions are known, each of which has a type of its own.
fn merge(into: &mut Value, patch: &Value) -> Result<(), u16> {
    match patch {
        Value::Object(fields) => {
            for (key, value) in fields {
                merge(&mut into[key], value)?;
            }
        }
        Value::Array(conditions) => {
            if into.is_null() {
                *into = Value::Array(Vec::new());
            }
            let there = into.as_array_mut().ok_or(422_u16)?;
            for condition in conditions {
                let kind = condition["type"].as_str().ok_or(422_u16)?;
                match there.iter_mut().find(|one| one["type"] == kind) {
                    Some(one) => merge(one, condition)?,
                    None => there.push(condition.clone()),
                }
            }
        }
        other => *into = other.clone(),
    }
    Ok(())
}

fn operate(node: &mut Value, operation: &Value) -> Result<(), u16> {
    let path = operation["path"].as_str().ok_or(400_u16)?;
    let place = node.pointer_mut(path).ok_or(422_u16)?;
    match operation["op"].as_str() {
        Some("test") if *place == operation["value"] => Ok(()),
        Some("test") => Err(422),
        Some("replace") => {
            *place = operation["value"].clone();
            Ok(())
        }
        _ => Err(400),
    }
}
