package printer

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	gotemplate "text/template"

	"k8s.io/apimachinery/pkg/util/json"
	"k8s.io/client-go/util/jsonpath"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

// How the formats with a template begin.
const (
	formatJSONPath = "jsonpath="
	formatTemplate = "go-template="
)

// Template writes what a user wants of a result, which it gets as decoded JSON.
type Template func(out io.Writer, result any) error

// ParseTemplate reads a format with a template.
func ParseTemplate(format string) (Template, error) {
	if text, is := strings.CutPrefix(format, formatJSONPath); is {
		parsed := jsonpath.New("jsonpath").AllowMissingKeys(true)
		if !strings.Contains(text, "{") { // a bare path
			text = "{." + strings.TrimPrefix(text, ".") + "}"
		}
		if err := parsed.Parse(text); err != nil {
			return nil, fmt.Errorf("--output %s: %w", format, err)
		}
		return parsed.Execute, nil
	}
	if text, is := strings.CutPrefix(format, formatTemplate); is {
		parsed, err := gotemplate.New("go-template").Parse(text)
		if err != nil {
			return nil, fmt.Errorf("--output %s: %w", format, err)
		}
		return parsed.Execute, nil
	}
	return nil, fmt.Errorf("--output %q is not %s", format, FormatsHelp)
}

// fill returns the output for an encoded result, with a line end. The texts of the result are
// escaped; those of the template are the user's own.
func (t Template) fill(encoded []byte) ([]byte, error) {
	var result any
	if err := json.Unmarshal(encoded, &result); err != nil { // keeps whole numbers whole
		return nil, fmt.Errorf("read JSON: %w", err)
	}
	var out bytes.Buffer
	if err := t(&out, MapTexts(result, show.Escape)); err != nil {
		return nil, fmt.Errorf("--output: %w", err)
	}
	if text := out.Bytes(); len(text) > 0 && text[len(text)-1] != '\n' {
		out.WriteByte('\n')
	}
	return out.Bytes(), nil
}

// MapTexts replaces all texts in decoded JSON, except the keys.
func MapTexts(v any, replace func(string) string) any {
	switch v := v.(type) {
	case string:
		return replace(v)
	case []any:
		for i := range v {
			v[i] = MapTexts(v[i], replace)
		}
	case map[string]any:
		for key := range v {
			v[key] = MapTexts(v[key], replace)
		}
	}
	return v
}
