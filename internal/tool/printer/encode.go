package printer

import (
	"bytes"
	"encoding/json"
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/yaml"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

// Object is a message as a program reads it.
type Object struct {
	Message proto.Message
}

// MarshalJSON writes zero numbers and empty lists too, so that a program finds every key.
func (o Object) MarshalJSON() ([]byte, error) {
	return protojson.MarshalOptions{EmitDefaultValues: true}.Marshal(o.Message)
}

// Objects makes a list of messages. An empty list is not nil: its JSON is [].
func Objects[M proto.Message](messages []M) []Object {
	all := make([]Object, len(messages))
	for i, m := range messages {
		all[i] = Object{m}
	}
	return all
}

// toJSON encodes a value or a message, and removes the random spaces of protojson.
func toJSON(v any, indent string) ([]byte, error) {
	if m, ok := v.(proto.Message); ok {
		v = Object{m}
	}
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", indent)
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
