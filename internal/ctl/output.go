package ctl

import (
	"bytes"
	"encoding/json"
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/yaml"
)

// The output formats.
const (
	formatTable = "table"
	formatWide  = "wide"
	formatJSON  = "json"
	formatYAML  = "yaml"
)

// machine tells whether a program reads the output.
func (a *app) machine() bool { return a.output == formatJSON || a.output == formatYAML }

// toJSON is protojson made stable: that one puts in spaces at random. Zero
// numbers and empty lists are written, so that a program finds every key.
func toJSON(m proto.Message) (json.RawMessage, error) {
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

// toJSONList makes {"name": [...]}.
func toJSONList[M proto.Message](name string, items []M) (json.RawMessage, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, `{"%s":[`, name)
	for i, item := range items {
		raw, err := toJSON(item)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.Write(raw)
	}
	b.WriteString("]}")
	return b.Bytes(), nil
}

// printMessage prints a message for a program.
func (a *app) printMessage(m proto.Message) error {
	raw, err := toJSON(m)
	if err != nil {
		return err
	}
	return a.printRaw(raw)
}

// printRaw prints JSON in the format asked for.
func (a *app) printRaw(raw json.RawMessage) error {
	text, err := indent(raw)
	if err == nil && a.output == formatYAML {
		text, err = toYAML(text)
	}
	if err != nil {
		return err
	}
	_, err = a.world.Out.Write(text)
	return err
}

func indent(raw json.RawMessage) ([]byte, error) {
	var b bytes.Buffer
	if err := json.Indent(&b, raw, "", "  "); err != nil {
		return nil, fmt.Errorf("write JSON: %w", err)
	}
	b.WriteByte('\n')
	return escapeJSON(b.Bytes()), nil
}

// toYAML gives YAML. Its writer leaves some signs that a terminal obeys; then it
// is the JSON, which is YAML too and has them escaped.
func toYAML(asJSON []byte) ([]byte, error) {
	text, err := yaml.JSONToYAML(asJSON)
	if err != nil {
		return nil, fmt.Errorf("write YAML: %w", err)
	}
	if escapeLines(string(text)) != string(text) {
		return asJSON, nil
	}
	return text, nil
}
