package printer

import (
	"bytes"
	"encoding/json"
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/yaml"

	"github.com/crust-proxy/crust-proxy/internal/cli/show"
)

// Encode gives a message's JSON. protojson adds random spaces; they are removed. Zero
// numbers and empty lists are written, so that a program finds every key.
func Encode(m proto.Message) (json.RawMessage, error) {
	loose, err := protojson.MarshalOptions{EmitDefaultValues: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("write JSON: %w", err)
	}
	var tight bytes.Buffer
	if err := json.Compact(&tight, loose); err != nil {
		return nil, fmt.Errorf("write JSON: %w", err)
	}
	return tight.Bytes(), nil
}

// EncodeAll encodes each message of a list. An empty list is not nil: its JSON is [].
func EncodeAll[M proto.Message](items []M) ([]json.RawMessage, error) {
	all := make([]json.RawMessage, 0, len(items))
	for _, item := range items {
		raw, err := Encode(item)
		if err != nil {
			return nil, err
		}
		all = append(all, raw)
	}
	return all, nil
}

func indented(v any) ([]byte, error) {
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(v); err != nil {
		return nil, fmt.Errorf("write JSON: %w", err)
	}
	return show.EscapeJSON(b.Bytes()), nil
}

// toYAML converts JSON to YAML. The YAML writer leaves some control characters as they
// are; then the JSON is used instead, which is valid YAML and has them escaped.
func toYAML(asJSON []byte) ([]byte, error) {
	text, err := yaml.JSONToYAML(asJSON)
	if err != nil {
		return nil, fmt.Errorf("write YAML: %w", err)
	}
	if show.EscapeLines(string(text)) != string(text) {
		return asJSON, nil
	}
	return text, nil
}
