package config

import (
	"bytes"
	"cmp"
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
	wrong, ok := errors.AsType[*json.UnmarshalTypeError](err)
	if !ok {
		return err
	}
	is, _, _ := strings.Cut(wrong.Value, " ") // a number's own digits may follow
	wanted, hint := wordFor(wrong.Type), ""
	if wanted == "text" {
		hint = " (quote text that looks like something else)"
	}
	return fmt.Errorf("%s: %s cannot stand here; it takes %s%s", wrong.Field, cmp.Or(jsonWords[is], is), wanted, hint)
}

// jsonWords are the words of encoding/json for what a file has, in YAML's terms.
var jsonWords = map[string]string{
	"array": "a list", "object": "a map of keys and values", "string": "text", "number": "a number", "bool": "true or false",
}

// wordFor names what a key takes.
func wordFor(as reflect.Type) string {
	switch as.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.String:
		return "text"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Struct, reflect.Map:
		return "a map of keys and values"
	case reflect.Pointer:
		return wordFor(as.Elem())
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return "a whole number, and not a negative one"
	default:
		return "a whole number"
	}
}
