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

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// toJSON converts one YAML document. A duplicate key is an error.
func toJSON(raw []byte) ([]byte, error) {
	if err := oneDocument(raw); err != nil {
		return nil, err
	}
	text, err := yaml.YAMLToJSONStrict(raw)
	return text, notYAML(err)
}

// notYAML rewrites an error of the YAML library for readers who do not know the library.
func notYAML(err error) error {
	if err == nil {
		return nil
	}
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	text = strings.TrimSpace(strings.TrimPrefix(text, "unmarshal errors:"))
	text = strings.ReplaceAll(text, "already set in map", "is there twice")
	if strings.Contains(text, "cannot start any token") {
		text += " (a tab? indent by spaces)"
	}
	return fmt.Errorf("this is not valid YAML: %s", text)
}

// oneDocument refuses a second document, which would be silently ignored.
func oneDocument(raw []byte) error {
	decoder := yamlv2.NewDecoder(bytes.NewReader(raw))
	var document any
	if err := decoder.Decode(&document); err != nil {
		if errors.Is(err, io.EOF) {
			return nil // an empty file
		}
		return notYAML(err)
	}
	if !errors.Is(decoder.Decode(&document), io.EOF) {
		return errors.New("there is more than one YAML document: remove all from the second --- on")
	}
	return nil
}

// check reports every unknown key, every value of a wrong type and every rule without defer,
// each with its path. The decoder of encoding/json would stop at the first, name neither the
// element of a list nor the key of a map, and accept a key in the wrong case.
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

func problems(tree any, as reflect.Type, at string) (found []error) {
	switch value := tree.(type) {
	case []any:
		if as.Kind() != reflect.Slice {
			return wrongKind("a list", as, at)
		}
		for i, element := range value {
			found = append(found, problems(element, as.Elem(), fmt.Sprintf("%s[%d]", at, i))...)
		}
		return found
	case map[string]any:
		switch as.Kind() {
		case reflect.Struct:
			return problemsOfKeys(value, as, at)
		case reflect.Map:
			for _, key := range slices.Sorted(maps.Keys(value)) {
				found = append(found, problems(value[key], as.Elem(), fmt.Sprintf("%s[%q]", at, key))...)
			}
			return found
		default:
			return wrongKind("a map of keys and values", as, at)
		}
	case nil:
		if as == reflect.TypeFor[policy.Rule]() {
			return problemsOfKeys(nil, as, at)
		}
		return nil // a key without a value keeps its default
	default:
		return problemOfValue(value, as, at)
	}
}

func problemsOfKeys(values map[string]any, as reflect.Type, at string) (found []error) {
	if as == reflect.TypeFor[policy.Rule]() && values["defer"] == nil {
		// A rule without it would silently keep volumes on the host.
		name, _ := values["name"].(string)
		found = append(found, fmt.Errorf("%s (%q).defer: is missing: say true or false", at, name))
	}
	if at != "" {
		at += "."
	}
	known := keysOf(as)
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

// problemOfValue lets the decoder check a single value.
func problemOfValue(value any, as reflect.Type, at string) []error {
	raw, err := json.Marshal(value)
	if err == nil {
		err = json.Unmarshal(raw, reflect.New(as).Interface())
	}
	if err == nil {
		return nil
	}
	if as == reflect.TypeFor[Duration]() {
		return []error{fmt.Errorf("%s: %w", at, err)}
	}
	is := "a number" // its digits may not be those of the file: 0600 is read as 384
	switch value.(type) {
	case bool:
		is = "true or false"
	case string:
		is = "text"
	default:
		if strings.Contains(sys.KindWord(as), "number") {
			is = string(raw)
		}
	}
	return wrongKind(is, as, at)
}

// wrongKind reports, in YAML terms, which type a value has and which one the key takes.
func wrongKind(is string, as reflect.Type, at string) []error {
	hint := ""
	if as.Kind() == reflect.String {
		hint = " (quote text that looks like something else)"
	}
	return []error{fmt.Errorf("%s: %s cannot stand here; it takes %s%s", at, is, sys.KindWord(as), hint)}
}

func keysOf(as reflect.Type) map[string]reflect.Type {
	keys := make(map[string]reflect.Type, as.NumField())
	for field := range as.Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		keys[name] = field.Type
	}
	return keys
}
