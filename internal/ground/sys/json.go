package sys

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// EncodeJSON encodes a record of at most limit bytes, the size up to which it is read back. A
// longer record is an error. HTML is not escaped, because that can make a text six times as long.
func EncodeJSON(value any, limit int) ([]byte, error) {
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil {
		return nil, err
	}
	raw := bytes.TrimSuffix(b.Bytes(), []byte("\n"))
	if len(raw) > limit {
		return nil, fmt.Errorf("it has %d bytes as JSON, more than the %d that are read back", len(raw), limit)
	}
	return raw, nil
}
