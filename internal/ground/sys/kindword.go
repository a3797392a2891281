package sys

import (
	"math"
	"reflect"
	"strconv"
)

// KindWord describes, for a person, which values a configuration key of this type accepts.
func KindWord(as reflect.Type) string {
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
		return KindWord(as.Elem())
	case reflect.Uint32:
		return "a whole number from 0 to " + strconv.Itoa(math.MaxUint32)
	default:
		return "a whole number"
	}
}
