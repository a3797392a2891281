package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strings"

	yamlv2 "go.yaml.in/yaml/v2"
	"sigs.k8s.io/yaml"
)

// toJSON reads one YAML document. A key that is there twice is an error.
func toJSON(raw []byte) ([]byte, error) {
	if err := oneDocument(raw); err != nil {
		return nil, err
	}
	return yaml.YAMLToJSONStrict(raw)
}

// oneDocument refuses a second document, which would be passed over in silence.
func oneDocument(raw []byte) error {
	decoder := yamlv2.NewDecoder(bytes.NewReader(raw))
	var document any
	if err := decoder.Decode(&document); err != nil {
		if errors.Is(err, io.EOF) {
			return nil // an empty file
		}
		return err
	}
	if !errors.Is(decoder.Decode(&document), io.EOF) {
		return errors.New("there is more than one YAML document: remove all from the second --- on")
	}
	return nil
}

// check names every key that is not one of ours and every duration that is none,
// each with its place. The decoder of encoding/json would stop at the first, name
// no place, and take a key in the wrong case.
func check(text []byte) error {
	var tree any
	if err := json.Unmarshal(text, &tree); err != nil {
		return err
	}
	if _, ok := tree.(map[string]any); !ok && tree != nil {
		return errors.New("the configuration is not a map of keys and values")
	}
	return errors.Join(problems(tree, reflect.TypeFor[Config](), "")...)
}

func problems(tree any, as reflect.Type, at string) []error {
	if as == reflect.TypeFor[Duration]() && tree != nil {
		if _, err := durationOf(tree); err != nil {
			return []error{fmt.Errorf("%s: %w", at, err)}
		}
		return nil
	}
	if list, ok := tree.([]any); ok && as.Kind() == reflect.Slice {
		var found []error
		for i, element := range list {
			found = append(found, problems(element, as.Elem(), fmt.Sprintf("%s[%d]", at, i))...)
		}
		return found
	}
	values, ok := tree.(map[string]any)
	if !ok || as.Kind() != reflect.Struct {
		return nil // a wrong type is told when it is decoded
	}
	if at != "" {
		at += "."
	}
	known := keysOf(as)
	var found []error
	for _, key := range slices.Sorted(maps.Keys(values)) {
		if child, ok := known[key]; ok {
			found = append(found, problems(values[key], child, at+key)...)
			continue
		}
		found = append(found, fmt.Errorf("%s%s: unknown key; allowed here: %s",
			at, key, strings.Join(slices.Sorted(maps.Keys(known)), ", ")))
	}
	return found
}

func keysOf(as reflect.Type) map[string]reflect.Type {
	keys := make(map[string]reflect.Type, as.NumField())
	for field := range as.Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		keys[name] = field.Type
	}
	return keys
}

// named tells a type error in the terms of the file.
func named(err error) error {
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) {
		return fmt.Errorf("%s: a %s cannot stand here; it takes a %s (quote text that looks like a number)",
			wrong.Field, wrong.Value, wrong.Type)
	}
	return err
}
